from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longrecall
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints import find_saved_runs, step_folder
from longrecall.training.data import Batch, BatchStream
from longrecall.training.initial_states import make_initial_state
from longrecall.training.optimizer import make_optimizer, parameter_groups, touched_names
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from longrecall.training.schedule import rate_factor

MakeRecipe = Callable[..., Recipe]


class Killed(BaseException):
    """Ends a run from inside, like a signal: no handler for errors sees it."""


def train(recipe: Recipe, **options: Any) -> list[dict[str, Any]]:
    run_recipe(recipe, show_progress=False, **options)
    rows = [json.loads(line) for line in (Path(recipe.run.output) / "log.jsonl").read_text().splitlines()]
    # The speed of the machine is no part of a run's result.
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kill_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Let the stream die when batch number `batches` (0-based) of the training is asked for."""
    original, count = BatchStream.__iter__, iter(range(10_000))

    def dying(self: BatchStream) -> Any:
        for batch in original(self):
            if next(count) == batches:
                raise Killed
            yield batch

    monkeypatch.setattr(BatchStream, "__iter__", dying)


def test_equals_a_loop_written_by_hand(make_recipe: MakeRecipe) -> None:
    """Accumulation, token-weighted loss, clipping, groups, schedule and state passing, against plain torch."""
    recipe = make_recipe("run.steps=4", "optimizer.clip=0.5", "optimizer.hold=0.5")
    rows = train(recipe)
    source = open_checkpoint(recipe.model.checkpoint)
    model = longrecall.load(recipe.model.checkpoint, dtype="float32").train()
    groups = parameter_groups([n for n, _ in model.named_parameters()], touched_names(source.surgery), recipe.optimizer)
    optimizer = make_optimizer(model, groups, recipe.optimizer)
    stream = BatchStream(recipe.data, byte_tokenizer(), recipe.run.batch_size)
    initial = make_initial_state(recipe.initial_state, model, recipe.run.seed, 0)
    for step, row in enumerate(rows):
        batches = [stream.next_batch() for _ in range(2)]
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        loss = torch.zeros(())
        for batch in batches:
            out = model(batch["input_ids"], past_key_values=initial.before_batch(torch.ones(3, dtype=torch.bool)))
            initial.after_batch(out.past_key_values)
            loss = loss + torch.nn.functional.cross_entropy(
                out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
        loss = loss / labels
        loss.backward()
        for group, mine in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = mine.learning_rate * rate_factor(step, 4, recipe.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        # Gradients of two micro-batches are added in another order: float32 rounding, grown over four steps.
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    final = weights(Path(recipe.run.output) / "final")
    for name, parameter in model.named_parameters():
        # AdamW's first steps are of size lr whatever the gradient, so rounding of tiny gradients shows; steps are 0.03.
        assert torch.allclose(final[name], parameter, atol=1e-4), name


def test_training_learns_and_leaves_a_checkpoint(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("run.steps=30", "run.log_every=5", "optimizer.schedule=constant")
    summary = run_recipe(recipe, show_progress=False)
    assert summary.first_loss is not None and summary.last_loss is not None
    # 258 tokens start at ln 258 = 5.55; the text repeats itself, so 30 steps must take off far more than noise.
    assert summary.last_loss < summary.first_loss - 0.5
    assert summary.tokens == 30 * 3 * 2 * 48
    model = longrecall.load(summary.checkpoint)
    assert model.config.context_length == 48
    assert "use_cache" not in json.loads((Path(summary.checkpoint) / "config.json").read_text())
    ids = torch.tensor([[84, 104, 101]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
    surgery = open_checkpoint(summary.checkpoint).surgery
    assert surgery == open_checkpoint(recipe.model.checkpoint).surgery
    result = json.loads((Path(recipe.run.output) / "training.json").read_text())
    assert (result["schema"], result["kind"]) == (1, "training")
    assert [row["step"] for row in result["log"]] == [5, 10, 15, 20, 25, 30]
    assert Recipe.from_dict(result["recipe"]) == recipe
    assert result["checkpoint"]["state_size"] == model.state_size()
    assert result["checkpoint"]["fingerprint"] == model.fingerprint()


@pytest.mark.parametrize("initial", ["state_passing", "zero"])
@pytest.mark.parametrize(("killed_at", "resumed_from"), [(6, 3), (9, 3), (3, 0)])
def test_resume_after_a_kill_is_exact(
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    initial: str,
    killed_at: int,
    resumed_from: int,
) -> None:
    """Six steps in one go, and killed before micro-batch `killed_at`: the same losses and weights, bit for bit."""
    overrides = ["run.save_every=3", f"initial_state={{kind: {initial}}}"]
    whole = make_recipe(*overrides, f"run.output={tmp_path / 'whole'}")
    expected = train(whole)
    recipe = make_recipe(*overrides)
    with monkeypatch.context() as patch:
        kill_after(patch, killed_at)
        with pytest.raises(Killed):
            train(recipe)
    assert not (Path(recipe.run.output) / "final").exists()
    assert run_recipe(recipe, resume=True, show_progress=False).resumed_from == resumed_from
    rows = [json.loads(line) for line in (Path(recipe.run.output) / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    assert [row["gradient_norm"] for row in rows] == [row["gradient_norm"] for row in expected]
    for folder in ("final", "steps/step-00000006"):
        assert equal(weights(Path(recipe.run.output) / folder), weights(tmp_path / "whole" / folder))


def test_resume_between_log_lines_keeps_the_running_mean(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = ["run.save_every=4", "run.log_every=3"]
    expected = train(make_recipe(*overrides, f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe(*overrides)
    with monkeypatch.context() as patch:
        kill_after(patch, 10)
        with pytest.raises(Killed):
            train(recipe)
    assert train(recipe, resume=True) == expected


def test_half_written_and_damaged_checkpoints_are_passed_over(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = ["run.save_every=2", "run.keep=5"]
    expected = train(make_recipe(*overrides, f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe(*overrides)
    output = Path(recipe.run.output)
    with monkeypatch.context() as patch:
        kill_after(patch, 9)
        with pytest.raises(Killed):
            train(recipe)
    assert [saved.step for saved in find_saved_runs(output)] == [2, 4]
    damaged = step_folder(output, 4) / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shutil.copytree(step_folder(output, 2), output / "steps" / ".step-00000006.partial")
    (step_folder(output, 5)).mkdir()
    assert [saved.step for saved in find_saved_runs(output)] == [2]
    assert train(recipe, resume=True) == expected
    assert not list((output / "steps").glob(".step*"))
    assert equal(weights(output / "final"), weights(tmp_path / "whole" / "final"))


def test_resume_of_a_finished_run_trains_nothing(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    rows = train(recipe)
    before = weights(Path(recipe.run.output) / "final")
    assert run_recipe(recipe, resume=True, show_progress=False).resumed_from == 6
    assert equal(weights(Path(recipe.run.output) / "final"), before)
    assert len(rows) == 6


def test_resume_refuses_another_recipe(make_recipe: MakeRecipe) -> None:
    train(make_recipe("run.steps=2"))
    with pytest.raises(UserError, match=r"optimizer\.learning_rate was 0\.01 and is now 0\.02"):
        run_recipe(make_recipe("run.steps=2", "optimizer.learning_rate=0.02"), resume=True)
    with pytest.raises(UserError, match="holds a run already"):
        run_recipe(make_recipe("run.steps=2"))


def test_old_checkpoints_are_dropped(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("run.save_every=1", "run.keep=2")
    train(recipe)
    assert [saved.step for saved in find_saved_runs(Path(recipe.run.output))] == [5, 6]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_loss_stops_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The message names the step, the data and the last good checkpoint, which is there and finite."""
    recipe = make_recipe("run.save_every=2")
    original = RecurrentLM.forward
    calls = iter(range(100))

    def poisoned(self: RecurrentLM, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if next(calls) == 7:  # two micro-batches a step: the fourth step
            out.loss = out.loss * value
        return out

    monkeypatch.setattr(RecurrentLM, "forward", poisoned)
    message = rf"the loss is {value} in step 4 \(data: sequences 21-23 of process 0: .*\)"
    with pytest.raises(UserError, match=message) as caught:
        train(recipe)
    good = step_folder(Path(recipe.run.output), 2)
    assert f"last good checkpoint: {good};" in str(caught.value) and "\n" not in str(caught.value)
    assert [saved.folder for saved in find_saved_runs(Path(recipe.run.output))] == [good]
    assert all(bool(tensor.isfinite().all()) for tensor in weights(good).values())


def test_nan_gradient_stops_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe()
    original = RecurrentLM.forward

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * float("nan")

    def poisoned(self: RecurrentLM, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.loss = Poison.apply(out.loss)
        return out

    monkeypatch.setattr(RecurrentLM, "forward", poisoned)
    with pytest.raises(UserError, match=r"the gradient norm is nan in step 1 .* last good checkpoint: none yet"):
        train(recipe)


def test_no_space_left_while_saving(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands in for a full disk: the system itself refuses the write."""
    recipe = make_recipe("run.save_every=2")
    original = BatchStream.next_batch
    calls = iter(range(100))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(self: BatchStream) -> Batch:
        if next(calls) == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        return original(self)

    monkeypatch.setattr(BatchStream, "next_batch", filling)
    try:
        with pytest.raises(UserError, match=r"cannot save step 4: .*; last good checkpoint: .*step-00000002") as caught:
            train(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    output = Path(recipe.run.output)
    assert [path.name for path in (output / "steps").iterdir()] == ["step-00000002"]
    assert [saved.step for saved in find_saved_runs(output)] == [2]
    monkeypatch.undo()
    assert len(train(recipe, resume=True)) == 6


def test_output_that_cannot_be_written(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"run\.output .* cannot be written"):
        run_recipe(make_recipe(f"run.output={tmp_path / 'file' / 'out'}"))


def test_gradient_accumulation_equals_one_large_batch(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Also when the micro-batches have very different numbers of labels."""
    zero = "initial_state={kind: zero}"
    one = train(make_recipe(zero, "run.batch_size=6", "run.gradient_accumulation=1", f"run.output={tmp_path / 'one'}"))
    six = train(make_recipe(zero, "run.batch_size=1", "run.gradient_accumulation=6", f"run.output={tmp_path / 'six'}"))
    for a, b in zip(one, six, strict=True):
        # The same sums in another order, float32, over six steps of AdamW.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-3)


def test_gradient_checkpointing_changes_nothing(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    plain = train(make_recipe())
    saved = train(make_recipe("run.gradient_checkpointing=true", f"run.output={tmp_path / 'saved'}"))
    for a, b in zip(plain, saved, strict=True):
        # The same operations run twice; only the order of additions into a gradient may differ.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_bf16_autocast_keeps_float32_weights(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    exact = train(make_recipe())
    rows = train(make_recipe("run.precision=bf16", f"run.output={tmp_path / 'bf16'}"))
    final = weights(tmp_path / "bf16" / "final")
    assert {tensor.dtype for tensor in final.values()} == {torch.float32}
    # bfloat16 has 8 bits: activations are off by up to 0.4 %, losses of about 5 by less than that.
    assert all(abs(a["loss"] - b["loss"]) < 0.05 for a, b in zip(exact, rows, strict=True))
    assert exact[0]["loss"] != rows[0]["loss"]


@pytest.fixture
def handing_over(tmp_path: Path, make_model: Callable[..., RecurrentLM]) -> Path:
    """A checkpoint whose first layer hands over from 4 to 8 state channels."""
    old = {"type": "mamba2", "inner_dim": 32, "head_dim": 16, "state_dim": 4}
    model = make_model({"type": "handover", "old": old, "new": {**old, "state_dim": 8}}, old)
    touched = [name for name, _ in model.named_parameters() if ".mixer.new." in name]
    record = {"method": "grow_state", "init": "handover", "touched": touched}
    save(model, tmp_path / "handover", byte_tokenizer(), [record])
    return tmp_path / "handover"


def test_handover_moves_and_the_last_checkpoint_holds_only_the_new_path(
    make_recipe: MakeRecipe, handing_over: Path
) -> None:
    recipe = make_recipe(
        f"model.checkpoint={handing_over}", "run.save_every=2", "run.keep=9", "run.steps=8", "handover.start=0.25",
        "handover.end=0.75",
    )  # fmt: skip
    rows = train(recipe)
    # After step s the layers stand where step s + 1 begins: (s / 8 - 1/4) / (1/2).
    assert [row["handover"] for row in rows] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    output = Path(recipe.run.output)
    half = longrecall.load(step_folder(output, 4))
    assert float(half.model.layers[0].mixer.progress) == 0.5
    final = longrecall.load(output / "final")
    assert [layer["mixer"]["type"] for layer in final.config.layers] == ["mamba2", "mamba2"]
    assert final.config.layers[0]["mixer"]["state_dim"] == 8
    last = longrecall.load(step_folder(output, 8))
    ids = torch.arange(40).view(2, 20)
    # At progress 1 the old path is multiplied by 0: the same numbers but for the rounding of that sum.
    torch.testing.assert_close(final(ids).logits, last(ids).logits, rtol=1e-6, atol=1e-6)
    names = {name for name, _ in final.named_parameters()}
    result = json.loads((output / "training.json").read_text())
    assert result["checkpoint"]["fingerprint"] == final.fingerprint()
    touched = open_checkpoint(output / "final").surgery[0]["touched"]
    assert touched and set(touched) <= names


def test_handover_resumes_exactly(
    make_recipe: MakeRecipe, handing_over: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = [f"model.checkpoint={handing_over}", "run.save_every=2"]
    expected = train(make_recipe(*overrides, f"run.output={tmp_path / 'whole'}"))
    recipe = make_recipe(*overrides)
    with monkeypatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            train(recipe)
    assert train(recipe, resume=True) == expected


def test_dry_run_reads_no_weights_and_writes_nothing(make_recipe: MakeRecipe, base: Path, tmp_path: Path) -> None:
    recipe = make_recipe("run.steps=null", "run.tokens=1m")
    weights_file = base / "model.safetensors"
    raw = weights_file.read_bytes()
    header = int.from_bytes(raw[:8], "little") + 8
    # Poison every weight: who reads them would notice, who reads the header would not.
    weights_file.write_bytes(raw[:header] + b"\xff" * (len(raw) - header))
    summary = run_recipe(recipe, dry_run=True)
    assert not Path(recipe.run.output).exists()
    assert summary.steps == -(-(1 << 20) // (3 * 2 * 48)) and summary.tokens == summary.steps * 288
    assert summary.batch_shapes == {"input_ids": (3, 48), "labels": (3, 48)}
    model = longrecall.load(tmp_path / "base")
    assert sum(group.parameters for group in summary.groups) == sum(p.numel() for p in model.parameters())
    touched = [group for group in summary.groups if group.name.startswith("touched")]
    assert [(group.tensors, group.parameters, group.learning_rate) for group in touched] == [(1, 8 * 16, 0.03)]
    assert "touched" in summary.table() and "0.03" in summary.table()


def test_checkpoint_without_tokenizer(make_recipe: MakeRecipe, base: Path) -> None:
    for path in base.glob("tokenizer*"):
        path.unlink()
    assert run_recipe(make_recipe(), dry_run=True).steps == 6  # 258 tokens: the embedded byte tokenizer
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be read"):
        run_recipe(make_recipe(), dry_run=True)


def test_tensorboard_events_are_written(make_recipe: MakeRecipe) -> None:
    pytest.importorskip("tensorboard")
    recipe = make_recipe("run.report_to=tensorboard", "run.steps=2")
    train(recipe)
    (events,) = (Path(recipe.run.output) / "tensorboard").iterdir()
    assert b"gradient_norm" in events.read_bytes()


def test_wandb_that_is_not_installed(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"run\.report_to is wandb, which is not installed"):
        run_recipe(make_recipe("run.report_to=wandb"))
