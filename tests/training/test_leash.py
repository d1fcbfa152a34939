"""A leash to a teacher in whole runs: what it holds, that it resumes exactly, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.data import BatchStream
from longrecall.training.initial_states import Zero
from longrecall.training.leash import Leash, LeashedBatch
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from longrecall.training.segments import Segments, read_batch

from .conftest import tiny_model
from .runs import Killed, equal, kill_after, train, weights

Make = Callable[..., Recipe]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    save(tiny_model(seed=1), tmp_path / "teacher", byte_tokenizer())
    return tmp_path / "teacher"


def first_batch(recipe: Recipe) -> dict[str, object]:
    return BatchStream(recipe.data, byte_tokenizer(), recipe.run.batch_size).next_batch()


def pulled(recipe: Recipe, teacher: Path, batch: dict, apart: bool = False) -> tuple[RecurrentLM, dict, torch.Tensor]:
    """The model, the parts of the loss, and the loss of a batch."""
    model = load(recipe.model.checkpoint).train()
    leash = Leash(recipe, load(teacher), model, sharded=False).of_batch(batch)
    segments = Segments.of(batch["starts"], recipe.data.context_length) if apart else None
    parts: dict[str, torch.Tensor] = {}
    ids, labels, text = (batch[name] for name in ("input_ids", "labels", "text"))
    loss = read_batch(model, ids, labels, text, Zero(), segments, parts, leash=leash)
    return model, parts, loss


def by_hand(recipe: Recipe, teacher: Path, batch: dict, held: torch.Tensor) -> float:
    """KL over the held tokens, from whole logits of rows as they are, by the number of labels."""
    own, aim = (
        load(path)(batch["input_ids"]).logits.double().log_softmax(-1) for path in (recipe.model.checkpoint, teacher)
    )
    each = (aim.exp() * (aim - own)).sum(-1)
    return ((each * held).sum() / (batch["labels"][:, 1:] != -100).sum()).item()


def test_a_run_is_pulled_and_resumes_exactly(
    make_recipe: Make, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["run.save_every=2", "run.log_every=2"]
    held = f"leash={{teacher: {teacher}, weight: 3, sources: [all], hidden: 0.5, top_k: 40}}"
    plain = train(make_recipe(*settings, f"run.output={tmp_path / 'plain'}"))
    rows = train(make_recipe(*settings, held))
    assert "leash_loss" not in plain[0] and all(row["loss"] > row["leash_loss"] > 0 for row in rows)
    whole = weights(tmp_path / "out" / "final")
    assert not equal(whole, weights(tmp_path / "plain" / "final"))
    written = json.loads((tmp_path / "out" / "training.json").read_text())["recipe"]["leash"]
    assert written["sha256"] == open_checkpoint(teacher).sha256() and written["teacher"] == str(teacher)
    killed = [*settings, held, f"run.output={tmp_path / 'killed'}"]
    with monkeypatch.context() as patch:
        # Between two lines of the log and after a checkpoint: nothing is open but the sums.
        kill_after(patch, 11)
        with pytest.raises(Killed):
            train(make_recipe(*killed))
    # The teacher may move, but must stay the same.
    shutil.copytree(teacher, tmp_path / "moved")
    moved = held.replace(str(teacher), str(tmp_path / "moved"))
    other = held.replace(str(teacher), make_recipe().model.checkpoint)
    with pytest.raises(UserError, match=r"leash\.sha256 was .* and is now"):
        train(make_recipe(*killed, other), resume=True)
    with pytest.raises(UserError, match=r"leash\.hidden was 0.5 and is now None"):
        train(make_recipe(*killed, "leash=none"), resume=True)
    assert train(make_recipe(*killed, moved), resume=True) == rows
    assert equal(weights(tmp_path / "killed" / "final"), whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_itself_pulls_nothing(make_recipe: Make, base: Path, tmp_path: Path, precision: str) -> None:
    """Exactly: in the first step, before a weight has changed, and in the gradient."""
    held = f"leash={{teacher: {base}, sources: [all], weight: 100, hidden: 100}}"
    # From a state of another text the teacher, which starts from none, is another model.
    settings = ["run.steps=1", "optimizer.warmup=0", f"run.precision={precision}", "initial_state={kind: zero}"]
    rows = train(make_recipe(*settings, held))
    plain = train(make_recipe(*settings, f"run.output={tmp_path / 'plain'}"))
    assert rows[0].pop("leash_loss") == 0.0 and rows == plain
    assert equal(*(weights(tmp_path / name / "final") for name in ("out", "plain")))


def test_what_is_held(make_recipe: Make, teacher: Path) -> None:
    recipe = make_recipe(f"leash={{teacher: {teacher}}}", "run.batch_size=6")
    batch = first_batch(recipe)
    text = batch["text"]
    assert 0 < int(text.sum()) < 6
    before_end = torch.arange(48) < 47
    labelled = torch.cat([batch["labels"][:, 1:] != -100, torch.zeros(6, 1, dtype=torch.bool)], 1)
    cases = {
        "sources: [text]": text[:, None] & before_end,
        "sources: [0]": text[:, None] & before_end,
        "sources: [phonebook], tokens: labelled": ~text[:, None] & labelled,
        "sources: [all], length: 20": (torch.arange(48) < 19).expand(6, 48),
        "sources: [text, tasks]": before_end.expand(6, 48),
    }
    for said, expected in cases.items():
        recipe = make_recipe(f"leash={{{said}}}", "run.batch_size=6")
        model = load(recipe.model.checkpoint)
        held = Leash(recipe, load(teacher), model, sharded=False).of_batch(batch).held
        assert torch.equal(held, expected), said
        _, parts, _ = pulled(recipe, teacher, batch)
        # float32 against float64 logits' sums: relative to a divergence of about 1.
        assert parts["leash_loss"].item() == pytest.approx(by_hand(recipe, teacher, batch, expected), rel=1e-5)


def test_the_leash_in_the_place_of_the_loss(make_recipe: Make, teacher: Path) -> None:
    """Text is held alone, phone books have their loss; the mean is over the labels of both."""
    said = "sources: [text], weight: 3"
    recipe, instead = (make_recipe(f"leash={{{s}}}", "run.batch_size=6") for s in (said, f"{said}, instead: true"))
    batch = first_batch(recipe)
    labels, text = batch["labels"], batch["text"]
    _, parts, loss = pulled(instead, teacher, batch)
    _, usual, _ = pulled(recipe, teacher, batch)
    assert parts == usual
    tasks = load(recipe.model.checkpoint)(batch["input_ids"], labels=labels.masked_fill(text[:, None], -100)).loss
    counts = [(labels[rows][:, 1:] != -100).sum() for rows in (~text, slice(None))]
    torch.testing.assert_close(loss, tasks * counts[0] / counts[1] + parts["leash_loss"])
    # A batch that has no other loss.
    nothing = make_recipe("leash={sources: [all], instead: true}", "run.batch_size=6")
    _, parts, loss = pulled(nothing, teacher, batch)
    assert loss.item() == parts["leash_loss"].item() and loss.requires_grad


def test_rows_without_labels_are_held_in_a_micro_batch_of_their_own(
    make_recipe: Make, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = BatchStream._give

    def every_second_labelled(stream: BatchStream, rows: list) -> dict:
        batch = give(stream, rows)
        batch["labels"] = batch["labels"].clone()
        batch["labels"][(batch["first"] + torch.arange(len(rows))) % 2 == 0] = -100
        return batch

    monkeypatch.setattr(BatchStream, "_give", every_second_labelled)
    settings = [
        f"leash={{teacher: {teacher}, sources: [all]}}",
        "initial_state={kind: zero}", "run.steps=1", "optimizer.warmup=0", "data.workers=0",
    ]  # fmt: skip
    found = {}
    for rows, batches in ((2, 1), (1, 2)):
        sizes = [f"run.batch_size={rows}", f"run.gradient_accumulation={batches}", f"run.output={tmp_path / str(rows)}"]
        found[rows] = train(make_recipe(*settings, *sizes))[0]
    for name in ("loss", "leash_loss", "gradient_norm"):
        # float32 sums in another order.
        assert found[1][name] == pytest.approx(found[2][name], rel=1e-5), name


def test_documents_apart_and_batches_without_rows(make_recipe: Make, teacher: Path) -> None:
    recipe = make_recipe(
        "leash={sources: [text], weight: 2, hidden: 1}", "data.reset_documents=true", "run.batch_size=6"
    )
    batch = first_batch(recipe)
    ids, text = batch["input_ids"], batch["text"]
    # A row that is one document is the same packed and alone; the others are read up to where the second one starts.
    alone = {**batch, "starts": [() for _ in range(6)]}
    _, packed, _ = pulled(recipe, teacher, {**batch, "starts": [(0,), *[() for _ in range(5)]]}, apart=True)
    _, rows, _ = pulled(recipe, teacher, alone)
    assert float(packed["leash_loss"]) == pytest.approx(float(rows["leash_loss"]), rel=1e-5)
    cut = {**batch, "starts": [(0, 24) for _ in range(6)]}
    _, pieces, _ = pulled(recipe, teacher, cut, apart=True)
    halves = {
        **batch,
        **{name: torch.cat(batch[name].split(24, 1)) for name in ("input_ids", "labels")},
        "text": text.repeat(2), "source": batch["source"] * 2, "starts": [() for _ in range(12)],
    }  # fmt: skip
    # Two documents of 24 tokens: as in rows of their own, but for the token that predicts over the border.
    _, apart, _ = pulled(recipe, teacher, halves)
    held = Leash(recipe, load(teacher), load(recipe.model.checkpoint), sharded=False)
    border = LeashedBatch(held, (text[:, None] & (torch.arange(48) == 23)).clone())
    model = load(recipe.model.checkpoint).train()
    segments = Segments.of(cut["starts"], 48)
    parts: dict[str, torch.Tensor] = {}
    read_batch(model, ids, batch["labels"], text, Zero(), segments, parts, leash=border)
    labels = [int((b["labels"][:, 1:] != -100).sum()) for b in (cut, halves)]
    sums = [float(p["leash_loss"]) * n for p, n in ((pieces, labels[0]), (parts, labels[0]), (apart, labels[1]))]
    assert sums[0] - sums[1] == pytest.approx(sums[2], rel=1e-5)
    # No row that it holds for: no loss, and the teacher reads nothing; but every process of a sharded one reads.
    nothing = {**batch, "source": [1] * 6}
    for sharded in (False, True):
        model = load(recipe.model.checkpoint).train()
        leash = Leash(recipe, load(teacher), model, sharded=sharded).of_batch(nothing)
        read: list[object] = []
        leash.leash._teacher.register_forward_hook(lambda *call, read=read: read.append(call))
        parts = {}
        read_batch(model, ids, batch["labels"], text, Zero(), None, parts, leash=leash).backward()
        assert parts["leash_loss"] == 0 and len(read) == sharded


def test_the_teacher_of_a_surgery(
    make_recipe: Make, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = tmp_path / "larger"
    assert main(["expand", str(base), str(larger), "--method", "grow_state", "--layers", "0"]) == 0
    recipe = make_recipe(f"model.checkpoint={larger}", "leash={}", "run.steps=1", "optimizer.warmup=0")
    shown = run_recipe(recipe, dry_run=True)
    assert (
        shown.leash == f"divergence from {base} on text, weight 1"
        and f"leash            {shown.leash}" in shown.table()
    )
    rows = train(recipe)
    # Surgery with noise moves the predictions a little.
    assert 0 < rows[0]["leash_loss"] < 0.1
    weights_file = base / "model.safetensors"
    save(tiny_model(seed=2), tmp_path / "new", byte_tokenizer())
    shutil.copy(tmp_path / "new" / "model.safetensors", weights_file)
    with pytest.raises(UserError, match="base has changed since the surgery that started from it"):
        train(recipe, force=True)
    assert (tmp_path / "out" / "final").exists()
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"it is the teacher, because surgery started from it\. Say in"):
        run_recipe(recipe, dry_run=True)


def test_what_is_refused(make_recipe: Make, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gla = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8}
    words = RecurrentConfig(vocab_size=300, hidden_size=16, layers=[{"mixer": gla}])
    save(RecurrentLM(words), tmp_path / "words", byte_tokenizer())
    save(tiny_model(gla), tmp_path / "flat", byte_tokenizer())
    digest = f"teacher: {teacher}, sha256: {'a' * 64}"
    refused = {
        "leash={weight: 0}": "leash: weight and hidden are both 0, so the leash has no effect; leave leash out",
        "leash={sources: [txt]}": 'leash.sources "txt" is none of data.sources; it takes all, text, tasks, phonebook',
        "leash={sources: [7]}": r'leash.sources "7" is none of data.sources',
        "leash={sources: []}": "sources is empty",
        "leash={tokens: some}": 'tokens "some" is none of all, labelled',
        "leash={temperature: 0}": "temperature must be above 0",
        "leash={weigth: 1}": 'unknown key "leash.weigth"',
        "leash={length: 1}": "length must be at least 2 tokens",
        "leash={}": "leash.teacher is missing, and the checkpoint has no record of surgery",
        "leash={teacher: nowhere}": "nowhere",
        f"leash={{teacher: {tmp_path / 'words'}}}": "predicts 300 tokens and the model 258; name another checkpoint",
        f"leash={{teacher: {tmp_path / 'flat'}, hidden: 1}}": "2 layers of width 16 and the teacher 1 of 16",
        f"leash={{{digest}}}": "does not match leash.sha256 aaaaaaaaaaaa",
    }
    recipe = make_recipe()
    (tmp_path / "r.yaml").write_text(json.dumps(recipe.to_dict()))
    for setting, line in refused.items():
        assert main(["train", str(tmp_path / "r.yaml"), "--set", setting]) == 2, setting
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and line in said[0], said
        assert not list(Path(recipe.run.output).glob("*")), setting
