from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longrecall
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints import step_folder
from longrecall.training.data import BatchStream
from longrecall.training.initial_states import make_initial_state
from longrecall.training.optimizer import make_optimizer, parameter_groups, touched_names
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from longrecall.training.schedule import rate_factor
from tests.training.runs import Killed, kill_after, train, weights

MakeRecipe = Callable[..., Recipe]


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
    done = replace(summary, first_loss=2.0, last_loss=1.5)
    assert "loss 2.0000 -> 1.5000 in" in done.table()
    # A run as short as one line of the log has one mean, and no change.
    assert "loss 1.5000, the mean of the steps, in" in replace(done, first_loss=1.5).table()


def test_checkpoint_without_tokenizer(make_recipe: MakeRecipe, base: Path) -> None:
    for path in base.glob("tokenizer*"):
        path.unlink()
    assert run_recipe(make_recipe(), dry_run=True).steps == 6  # 258 tokens: the embedded byte tokenizer
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot load the tokenizer in "):
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
