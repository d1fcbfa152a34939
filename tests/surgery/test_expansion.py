"""expand on disk: streaming, records, refusals, and that a run that fails leaves nothing."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models import checkpoint as checkpoints
from longrecall.models.accounting import account
from longrecall.models.checkpoint import Checkpoint, open_checkpoint, save
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery import ExpansionSummary, expand
from longrecall.surgery.registry import METHODS
from tests.surgery.conftest import SMALL

Build = Callable[..., RecurrentLM]
KINDS = {
    "merge_heads": ("gla", "gla_conv", "retnet"),
    "grow_state": ("mamba2", "mamba2_groups", "mamba2_plain"),
    "subheads": ("gated_delta_net", "gla_conv"),
    "add_retrieval": ("gla", "mamba2"),
}
CASES = [(method, kind, init) for method, kinds in KINDS.items() for kind in kinds for init in METHODS[method].inits]
each_case = pytest.mark.parametrize(("method", "kind", "init"), CASES)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(model: RecurrentLM, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


@pytest.fixture
def base(build: Build, tmp_path: Path) -> Path:
    save(build("mamba2", "attention", "mamba2", mlp_size=24), tmp_path / "base")
    return tmp_path / "base"


@each_case
def test_round_trip_equals_the_pure_functions(
    build: Build, operate: Build, tokens: Tensor, tmp_path: Path, method: str, kind: str, init: str
) -> None:
    model = build(kind, "attention", kind)
    save(model, tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    untouched, options = files_of(tmp_path / "base"), SMALL.get(method, {})
    summary = expand(tmp_path / "base", tmp_path / "out", method=method, layers="0,2", init=init, seed=7, **options)
    assert files_of(tmp_path / "base") == untouched
    expected, written = operate(model, method, (0, 2), init, seed=7), load(tmp_path / "out")
    assert written.config.layers == expected.config.layers
    ours, theirs = written.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits(written, tokens), logits(expected, tokens))
    save(written, tmp_path / "again", surgery=open_checkpoint(tmp_path / "out").surgery)
    assert torch.equal(logits(load(tmp_path / "again"), tokens), logits(expected, tokens))
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert summary.state_after == written.state_size() and summary.written
    assert summary.parameters_after == sum(parameter.numel() for parameter in written.parameters())
    assert set(summary.touched) <= set(dict(written.named_parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_on_disk_is_preserved(build: Build, tmp_path: Path, dtype: torch.dtype) -> None:
    save(build("mamba2").to(dtype), tmp_path / "base")
    expand(tmp_path / "base", tmp_path / "out", method="grow_state", layers="all", init="handover")
    written = open_checkpoint(tmp_path / "out")
    kinds = {name: written.dtype(name) for name in written.names()}
    assert kinds.pop("model.layers.0.mixer.progress") == torch.float32
    assert set(kinds.values()) == {dtype}


def test_record_and_model_card(base: Path, tmp_path: Path) -> None:
    summary = expand(base, tmp_path / "out", method="grow_state", layers="every:2", factor=2, seed=3)
    (record,) = json.loads((tmp_path / "out" / "surgery.json").read_text())
    assert record.pop("created")[:2] == "20" and record.pop("longrecall_version")
    assert record == {
        "method": "grow_state",
        "init": "preserve",
        "layers": [0, 2],
        "seed": 3,
        "options": {"factor": 2, "fresh": "measured", "noise_scale": 1.0},
        "source": {"path": str(base), "sha256": open_checkpoint(base).sha256()},
        "touched": [
            f"model.layers.{layer}.mixer.{name}"
            for layer in (0, 2)
            for name in ("conv.bias", "conv.weight", "in_proj.weight")
        ],
        "state_size": {"before": 256, "after": 512},
        "parameters": {"before": summary.parameters_before, "after": summary.parameters_after},
    }
    assert "grow_state" in (tmp_path / "out" / "README.md").read_text()


def test_second_expansion_appends_its_record(base: Path, tokens: Tensor, tmp_path: Path) -> None:
    expand(base, tmp_path / "one", method="grow_state", layers="0,2", factor=2)
    expand(tmp_path / "one", tmp_path / "two", method="grow_state", layers="0", factor=2)
    records = open_checkpoint(tmp_path / "two").surgery
    assert [record["layers"] for record in records] == [[0, 2], [0]]
    assert records[1]["source"]["sha256"] == open_checkpoint(tmp_path / "one").sha256()
    model = load(tmp_path / "two")
    assert [layer["mixer"].get("state_dim") for layer in model.config.layers] == [16, None, 8]
    # 1e-5 absolute in float32: the promise of preserve; only the order of summation over N changes.
    assert float((logits(model, tokens) - logits(load(base), tokens)).abs().max()) <= 1e-5
    rows = model.state_dict()["model.layers.0.mixer.in_proj.weight"][64:80]
    unit = rows / rows.norm(dim=1, keepdim=True)
    alike = (unit @ unit.T - torch.eye(16)).abs().max()
    # Random rows of 16 numbers have a cosine of 1/4 or so; a repeated draw, whatever its size, has 1.
    assert alike < 0.95, "the second growth repeated rows of the first"


def test_dry_run_reads_no_weights_and_writes_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Checkpoint, name: str = "") -> None:
        raise AssertionError(f"a dry run read {name or 'every file'}")

    monkeypatch.setattr(Checkpoint, "read", refuse)
    monkeypatch.setattr(Checkpoint, "sha256", refuse)
    before = set(os.listdir(tmp_path))
    summary = expand(base, tmp_path / "out", method="grow_state", layers="0", state_dim=10, dry_run=True)
    assert set(os.listdir(tmp_path)) == before and not summary.written
    assert (summary.state_before, summary.state_after) == (256, 128 + 320)
    assert summary.chosen_layers == (0,)


def test_dry_run_and_real_run_agree(base: Path, tmp_path: Path) -> None:
    dry = expand(base, tmp_path / "out", method="grow_state", layers="0", dry_run=True)
    real = expand(base, tmp_path / "out", method="grow_state", layers="0")
    assert dry.to_dict() | {"written": True} == json.loads(json.dumps(real.to_dict())) | {
        "layers": dry.to_dict()["layers"],
        "touched": dry.touched,
        "warnings": dry.warnings,
    }
    counted = account(open_checkpoint(tmp_path / "out").config)
    assert (dry.state_after, dry.parameters_after) == (counted.state_size, counted.parameters)


def test_table_shows_every_layer_totals_and_warnings(base: Path, tmp_path: Path) -> None:
    summary = expand(base, tmp_path / "out", method="grow_state", layers="0,2", init="inherit", dry_run=True)
    lines = summary.table().splitlines()
    assert lines[0].split() == ["layers", "mixer", "state", "new", "state", "parameters", "new", "parameters"]
    # Layers that are alike are one row.
    assert lines[1].split()[:5] == ["0,2", "*", "mamba2", "128", "512"]
    assert lines[2].split()[:4] == ["1", "attention", "0", "0"]
    assert "256" in lines[3] and "1,024" in lines[3] and f"{summary.parameters_after:,}" in lines[3]
    assert "x4" in lines[4] and lines[5].startswith("warning: ") and "gradient stays zero" in lines[5]
    assert len({len(line) for line in lines[:4]}) == 1


def test_a_handover_also_tells_what_remains_when_it_is_done(base: Path, tmp_path: Path) -> None:
    beside = expand(base, tmp_path / "a", method="grow_state", layers="0", init="handover", dry_run=True)
    alone = expand(base, tmp_path / "b", method="grow_state", layers="0", init="reinit", dry_run=True)
    assert (beside.state_after, beside.state_finished) == (256 + 512, 128 + 512)
    assert beside.parameters_finished == alone.parameters_after == alone.parameters_finished
    assert alone.state_finished == alone.state_after
    assert f"once the old path is dropped: state 640 (x2.5), parameters {alone.parameters_after:,}" in beside.table()
    assert "once" not in alone.table()


class Meter:
    """Counts the bytes of all tensors that `Checkpoint.read` handed out and that are still alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive, self.most, self.total = 0, 0, 0
        original = Checkpoint.read

        def read(checkpoint: Checkpoint, name: str) -> Tensor:
            tensor = original(checkpoint, name)
            size = tensor.nbytes
            self.alive += size
            self.total += size
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor, self.forget, size)
            return tensor

        monkeypatch.setattr(Checkpoint, "read", read)

    def forget(self, size: int) -> None:
        self.alive -= size


@pytest.mark.parametrize("init", ["preserve", "handover", "reinit"])
def test_the_model_is_never_in_memory_as_a_whole(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    save(build(*["mamba2"] * 12, mlp_size=24), tmp_path / "base")
    config = open_checkpoint(tmp_path / "base").config
    layer = max(entry.parameters for entry in account(config).layers) * 4
    largest = config.vocab_size * config.hidden_size * 4
    # Shards of one layer: with the default of 1 GiB the writer itself would hold all of this small model.
    monkeypatch.setattr(checkpoints, "DEFAULT_SHARD_BYTES", layer)
    gc.collect()
    meter = Meter(monkeypatch)
    expand(tmp_path / "base", tmp_path / "out", method="grow_state", layers="all", init=init)
    assert meter.total >= 12 * layer, "the meter must have seen every tensor"
    # One layer that is being edited, and the tensor that was yielded last.
    assert meter.most <= layer + largest
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 10


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"method": "grow_states"}, 'Did you mean "grow_state"'),
    ({"init": "keep"}, 'init "keep" is unknown to grow_state'),
    ({"layers": "0,9"}, "9 is out of range"),
    ({"layers": "0,1"}, "layer 1 is attention"),
    ({"method": "merge_heads"}, "layer 0 is mamba2"),
    ({"factr": 2}, 'Did you mean "factor"'),
    ({"state_dim": 2}, "grow_state, layer 0 \\(mamba2\\): state_dim 2 is not larger"),
    ({"seed": "0"}, "seed '0' is not a whole number"),
]


@pytest.mark.parametrize(("change", "cause"), REFUSALS)
def test_refusals_come_before_anything_is_written(
    base: Path, tmp_path: Path, change: dict[str, Any], cause: str
) -> None:
    before = files_of(tmp_path)
    for dry_run in (False, True):
        wish = {"method": "grow_state", "layers": "0", **change}
        with pytest.raises(UserError, match=cause) as caught:
            expand(base, tmp_path / "out", dry_run=dry_run, **wish)
        assert "\n" not in str(caught.value)
    assert files_of(tmp_path) == before and not (tmp_path / "out").exists()


def test_source_and_output_must_be_apart(base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    before = files_of(base)
    for out, cause in [
        (base, "is the source itself"),
        (tmp_path / "link", "is the source itself"),
        (base / ".." / "base", "is the source itself"),
        (tmp_path, "contains the source"),
        (base / "out", "lies inside the source"),
    ]:
        with pytest.raises(UserError, match=cause):
            expand(base, out, method="grow_state", layers="0", force=True)
    for nowhere in ("", " "):
        with pytest.raises(UserError, match="output folder is empty"):
            expand(base, nowhere, method="grow_state", layers="0", force=True)
    assert files_of(base) == before


def test_an_occupied_output_needs_force(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="--force"):
        expand(base, out, method="grow_state", layers="0")
    assert files_of(out) == {"precious.txt": b"mine"}
    expand(base, out, method="grow_state", layers="0", force=True)
    assert load(out).config.layers[0]["mixer"]["state_dim"] == 16 and not (out / "precious.txt").exists()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_weights_leave_nothing(build: Build, tmp_path: Path, poison: float) -> None:
    model = build("mamba2", "mamba2")
    model.state_dict()["model.layers.1.mixer.conv.weight"][0, 0] = poison
    # Past save's own check, if it has one: the file is what a diverged run of another tool left behind.
    save(build("mamba2", "mamba2"), tmp_path / "base")
    from safetensors.torch import save_file

    stored = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(stored, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mixer\.conv\.weight"):
        expand(tmp_path / "base", tmp_path / "out", method="grow_state", layers="all")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_failure_half_way_leaves_the_old_output(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expand(base, tmp_path / "out", method="grow_state", layers="0", factor=2)
    before = files_of(tmp_path)
    original = Checkpoint.read

    def read(checkpoint: Checkpoint, name: str) -> Tensor:
        if name == "model.norm.weight":
            raise RuntimeError("the disk went away")
        return original(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(RuntimeError, match="disk went away"):
        expand(base, tmp_path / "out", method="grow_state", layers="0", force=True)
    assert files_of(tmp_path) == before


def test_summary_is_plain_data(base: Path, tmp_path: Path) -> None:
    summary = expand(base, tmp_path / "out", method="grow_state", layers=[2, 0], dry_run=True)
    assert isinstance(summary, ExpansionSummary) and summary.chosen_layers == (0, 2)
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["layers"][0]["state_after"] == 512 and data["layers"][1]["chosen"] is False
