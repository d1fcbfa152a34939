"""A process reads the rows that it holds and no others, whatever the format of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from longrecall.errors import UserError
from longrecall.models.checkpoint import Checkpoint, open_checkpoint, save
from longrecall.models.formats.weights import SafetensorsWeights
from longrecall.models.loading import materialise, materialise_sharded
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.parallel.place import make_place
from longrecall.training.parallel.shard import own_rows, shard_model
from longrecall.training.recipe import ParallelRecipe
from tests.models.checkpoints import GLA, HANDOVER, MAMBA2, model_of
from tests.models.naive import mom, rwkv7
from tests.models.naive.case import Naive
from tests.models.test_families import ids

WORLD = 4


@pytest.fixture
def ranks() -> Iterator[Iterator[int]]:
    """Be one of four processes after the other, without the others: collectives do nothing."""

    def each() -> Iterator[int]:
        for rank in range(WORLD):
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
            try:
                yield rank
            finally:
                torch.distributed.destroy_process_group()

    running = each()
    yield running
    running.close()


def part(checkpoint: Checkpoint, rank: int) -> RecurrentLM:
    place = make_place(ParallelRecipe(shard=2, context=2), rank, WORLD, torch.device("cpu"))
    shard = partial(shard_model, place=place)
    return materialise_sharded(checkpoint, torch.float32, "cpu", shard, own_rows, WORLD)


@pytest.mark.parametrize("name", ["native", "tied", "rwkv7", "mom"])
def test_rows_of_every_format(name: str, ranks: Iterator[int], tmp_path: Path) -> None:
    folder = tmp_path / "it"
    foreign: dict[str, list[Naive]] = {"rwkv7": rwkv7.CASES, "mom": mom.CASES}
    if name in foreign:
        foreign[name][0].write(folder, ids())
    else:
        save(model_of(GLA, MAMBA2, HANDOVER, tied=name == "tied"), folder)
    checkpoint = open_checkpoint(folder)
    whole = materialise(checkpoint, torch.float32)
    held: dict[str, list[torch.Tensor]] = {}
    for rank in ranks:
        model = part(checkpoint, rank)
        for key, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            held.setdefault(key, []).append(parameter.to_local().detach().clone())
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(whole.named_buffers())[key])
    assert held.keys() == dict(whole.named_parameters()).keys()
    for key, parameter in whole.named_parameters():
        assert torch.equal(torch.cat(held[key]), parameter), key


def test_nobody_reads_the_whole(ranks: Iterator[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model_of(), tmp_path / "it")
    checkpoint = open_checkpoint(tmp_path / "it")
    numbers, everything = [0], sum(p.numel() for p in materialise(checkpoint).parameters())

    def counted(self: SafetensorsWeights, *arguments: object) -> object:
        found = original(self, *arguments)  # type: ignore[arg-type]
        numbers[0] += found.numel()
        return found

    original = SafetensorsWeights.read_rows
    monkeypatch.setattr(SafetensorsWeights, "read_rows", counted)
    monkeypatch.delattr(SafetensorsWeights, "read")
    rows = 0
    for rank in ranks:
        numbers[0] = 0
        part(checkpoint, rank)
        # A quarter, and one row of every tensor that four does not divide.
        assert numbers[0] < 0.3 * everything
        rows += numbers[0]
    assert rows == everything


def test_a_head_that_is_not_tied(ranks: Iterator[int], tmp_path: Path) -> None:
    """Each process compares its own rows of a stored copy."""
    from safetensors.torch import load_file, save_file

    save(model_of(GLA, tied=True), tmp_path / "it")
    file = tmp_path / "it" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    part(open_checkpoint(tmp_path / "it"), next(ranks))
    tensors["lm_head.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    rank = next(ranks)
    with pytest.raises(UserError, match="says they are tied"):
        part(open_checkpoint(tmp_path / "it"), rank)
