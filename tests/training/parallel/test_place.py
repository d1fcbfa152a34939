"""Ranks of the mesh, and meshes that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longrecall.errors import RefusedTogether, UserError
from longrecall.training.parallel.place import Place, make_place, naming_the_dead, replicas
from longrecall.training.recipe import ParallelRecipe, Recipe

REFUSED: list[tuple[ParallelRecipe, int, str]] = [
    (ParallelRecipe(shard=8), 1, "= 8 processes, but this is a single one; start it with torchrun --nproc-per-node 8"),
    (ParallelRecipe(shard=3, context=2), 8, "shard 3 x context 2 = 6, which does not divide the 8 processes"),
    (ParallelRecipe(2, 2, 1), 8, "replicate 2 x shard 2 x context 1 = 4 processes, but there are 8; start 4, or leave"),
]


def test_context_ranks_are_neighbours() -> None:
    """Rank = (copy x shards + shard) x pieces + piece; the pieces of one row read the same rows."""
    places = [Place(rank, 12, 3, 2, 2) for rank in range(12)]
    assert [(place.data_rank, place.context_rank) for place in places] == [(i // 2, i % 2) for i in range(12)]
    assert {place.data_world for place in places} == {6}
    assert [place.first for place in places] == [True] + [False] * 11


def test_copies_are_what_is_left() -> None:
    assert replicas(ParallelRecipe(), 6) == 6
    assert replicas(ParallelRecipe(shard=2, context=2), 8) == 2
    assert replicas(ParallelRecipe(1, 1, 1), 1) == 1


def test_meshes_that_cannot_be() -> None:
    for recipe, world, line in REFUSED:
        with pytest.raises(UserError, match=line):
            replicas(recipe, world)
    with pytest.raises(RefusedTogether) as refusal:
        make_place(ParallelRecipe(shard=8), 0, 1, torch.device("cpu"))
    assert refusal.value.told_here


@pytest.mark.parametrize(
    "said",
    [
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:46853",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_what_torch_says_of_a_process_that_has_died(said: str) -> None:
    """While computing, and while looking for each other: one line, and no bug."""
    with pytest.raises(UserError, match="another process of this run has ended"), naming_the_dead(Place(1, 2)):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="Connection"), naming_the_dead(Place()):
        raise RuntimeError(said)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (("parallel.shard=0",), "parallel: shard must be above 0, got 0"),
        (("parallel.context=5",), r"parallel.context \(5\) does not divide data.context_length \(48\)"),
        (("parallel.context=2", "run.compile=true"), "run.compile cannot trace what the processes of parallel.context"),
        (("parallel.shard=2", "run.precision=fp16"), "run.precision fp16 scales its loss, .* use bf16 or fp32"),
    ],
)
def test_recipes_that_cannot_be(make_recipe: Callable[..., Recipe], override: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line):
        make_recipe(*override)
