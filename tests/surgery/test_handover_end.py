"""The end of a handover: the new path alone, as a plain mixer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery import expand, finish_checkpoint, finish_handover, handover_layers

Build = Callable[..., RecurrentLM]


@pytest.fixture(params=[("merge_heads", "gla"), ("merge_heads", "retnet"), ("grow_state", "mamba2_groups")])
def under_way(request: pytest.FixtureRequest, build: Build, tmp_path: Path) -> Path:
    method, kind = request.param
    save(build(kind, "attention", kind, mlp_size=24), tmp_path / "base")
    expand(tmp_path / "base", tmp_path / "way", method=method, layers="0,2", init="handover")
    return tmp_path / "way"


def set_progress(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("progress"):
            tensors[name] = torch.tensor(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return load(folder)(tokens).logits


def test_finished_model_computes_what_progress_1_computed(under_way: Path, tmp_path: Path, tokens: Tensor) -> None:
    set_progress(under_way, 1.0)
    assert finish_checkpoint(under_way, tmp_path / "done") == (0, 2)
    # old * 0 + new * 1 is exact in floating point as long as old is finite.
    assert torch.equal(logits(tmp_path / "done", tokens), logits(under_way, tokens))
    done = open_checkpoint(tmp_path / "done")
    assert handover_layers(done.config) == ()
    assert not any(".old." in name or ".new." in name or "progress" in name for name in done.names())


def test_records_name_the_tensors_that_remain(under_way: Path, tmp_path: Path) -> None:
    set_progress(under_way, 1.0)
    finish_checkpoint(under_way, tmp_path / "done")
    done = open_checkpoint(tmp_path / "done")
    (record,) = done.surgery
    assert record["init"] == "handover" and record["touched"]
    assert set(record["touched"]) <= set(done.names())
    assert len(record["touched"]) == len(open_checkpoint(under_way).surgery[0]["touched"])


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.999])
def test_unfinished_is_refused_unless_forced(under_way: Path, tmp_path: Path, progress: float) -> None:
    set_progress(under_way, progress)
    with pytest.raises(UserError, match=rf"layer 0 has handed over only {progress:.3g}"):
        finish_checkpoint(under_way, tmp_path / "done")
    assert not (tmp_path / "done").exists()
    finish_checkpoint(under_way, tmp_path / "done", force=True)
    assert handover_layers(load(tmp_path / "done").config) == ()


def test_streams_and_needs_only_names_and_read(under_way: Path) -> None:
    source = open_checkpoint(under_way)
    reads: list[str] = []

    class Reader:
        def names(self) -> list[str]:
            return source.names()

        def read(self, name: str) -> Tensor:
            reads.append(name)
            return source.read(name)

    config, tensors = finish_handover(source.config, Reader(), force=True)
    assert [name.rsplit(".", 1)[1] for name in reads] == ["progress", "progress"], "only progress is read up front"
    found = {name: tuple(tensor.shape) for name, tensor in tensors}
    assert found == config.tensor_shapes()
    assert not any(".mixer.old." in name for name in reads), "the old path is dropped unread"


def test_nothing_to_finish_is_no_error(under_way: Path, tmp_path: Path, tokens: Tensor) -> None:
    base = under_way.parent / "base"
    assert finish_checkpoint(base, tmp_path / "done") == ()
    assert torch.equal(logits(tmp_path / "done", tokens), logits(base, tokens))


def test_surgery_can_go_on_afterwards(under_way: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="handover; finish"):
        expand(under_way, tmp_path / "no", method="grow_state", layers="0")
    set_progress(under_way, 1.0)
    finish_checkpoint(under_way, tmp_path / "done")
    kind = open_checkpoint(tmp_path / "done").config.layers[0]["mixer"]["type"]
    if kind == "mamba2":
        expand(tmp_path / "done", tmp_path / "more", method="grow_state", layers="0", factor=2)
        assert len(open_checkpoint(tmp_path / "more").surgery) == 2
    else:
        with pytest.raises(UserError, match="one head"):
            expand(tmp_path / "done", tmp_path / "more", method="merge_heads", layers="0")
