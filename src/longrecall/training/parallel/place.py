"""Where one process of a run stands in the mesh that `parallel` in the recipe asks for, and how all agree to stop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longrecall.context import ContextGroup
from longrecall.errors import RefusedTogether, UserError
from longrecall.training.recipe import ParallelRecipe

MESH = ("replicate", "shard", "context")
"""Dimensions of the mesh, the outermost first: the ranks of one context group are neighbours."""
WEIGHTS_MESH = ("replicate", "weights")
"""The same ranks as the weights see them: they are sharded over shard x context."""


@dataclass(frozen=True)
class Place:
    """One process among the processes of a run.

    Processes that differ in `context_rank` alone read the same rows of a batch, each a piece of every row. Batches,
    initial states and learning curves therefore count data ranks.

    Attributes:
        rank, world: of all processes.
        replicate, shard, context_world: sizes of the mesh; their product is `world`.
        mesh: `MESH` over all processes; None for a single process.
        weights_mesh: `WEIGHTS_MESH`; None where every process has all weights.
        context: the processes that share this one's rows; None = rows are whole.
    """

    rank: int = 0
    world: int = 1
    replicate: int = 1
    shard: int = 1
    context_world: int = 1
    mesh: DeviceMesh | None = None
    weights_mesh: DeviceMesh | None = None
    context: ContextGroup | None = None

    @property
    def data_rank(self) -> int:
        """Number of this process's rows among the rows of a global batch."""
        return self.rank // self.context_world

    @property
    def data_world(self) -> int:
        """How many processes read rows of their own."""
        return self.world // self.context_world

    @property
    def context_rank(self) -> int:
        """Which piece of every row this process reads."""
        return self.rank % self.context_world

    @property
    def first(self) -> bool:
        """Whether this process writes what there is only one of."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self.weights_mesh is not None

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.world > 1:
            torch.distributed.barrier()

    def refuse_together(self, refusal: str | None) -> None:
        """Raise a refusal of any process in every process: none is left to wait for one that has ended.

        Of several refusals the one of the lowest rank is raised. The first process is the one that says it.
        """
        lines = self.gather(refusal)
        line = next((line for line in lines if line is not None), None)
        if line is not None:
            raise RefusedTogether(line, told_here=self.first)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let a UserError inside the block, in whatever process, end all of them at the end of the block.

        The block must not itself wait for other processes after something that can be refused.
        """
        refusal = None
        try:
            yield
        except RefusedTogether:
            raise
        except UserError as error:
            refusal = str(error)
        self.refuse_together(refusal)

    def gather(self, value: Any) -> list[Any]:
        """Return what every process gives, by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, value)
        return found


_LOST = re.compile(r"(closed|reset) by peer|likely closed|Broken pipe|remote process exited", re.IGNORECASE)
"""What torch's libraries say where a process waited for one that was killed."""


@contextmanager
def naming_the_dead(place: Place) -> Iterator[None]:
    """Turn what torch says inside the block when another process of the run has died into one line."""
    try:
        yield
    except RuntimeError as error:
        if place.world == 1 or not _LOST.search(str(error)):
            raise
        raise UserError(
            "another process of this run has ended; its own message says why. --resume continues from the last "
            "complete checkpoint"
        ) from error


def make_place(recipe: ParallelRecipe, rank: int, world: int, device: torch.device) -> Place:
    """Return the place of a process; every process of the run calls this.

    Args:
        recipe: the section `parallel`.
        rank, world: of the running process group (a single process has none).
        device: what this process computes on.

    Raises:
        UserError: the mesh has another number of processes, as every process finds.
    """
    with Place(rank, world).together():
        replicate = replicas(recipe, world)
    if world == 1:
        return Place()
    mesh = init_device_mesh(device.type, (replicate, recipe.shard, recipe.context), mesh_dim_names=MESH)
    pieces = recipe.shard * recipe.context
    weights = None
    if pieces > 1:
        weights = init_device_mesh(device.type, (replicate, pieces), mesh_dim_names=WEIGHTS_MESH)
    context = ContextGroup.of(mesh.get_group("context")) if recipe.context > 1 else None
    return Place(rank, world, replicate, recipe.shard, recipe.context, mesh, weights, context)


def replicas(recipe: ParallelRecipe, world: int) -> int:
    """Return how many copies of the weights `world` processes hold.

    Raises:
        UserError: the mesh does not divide the processes, or has another number of them.
    """
    pieces = recipe.shard * recipe.context
    wanted = pieces * (recipe.replicate or 1)
    asked = f"shard {recipe.shard} x context {recipe.context}"
    if recipe.replicate is not None:
        asked = f"replicate {recipe.replicate} x {asked}"
    if world == 1 and wanted > 1:
        raise UserError(
            f"parallel asks for {asked} = {wanted} processes, but this is a single one; start it with "
            f"torchrun --nproc-per-node {wanted} --no-python longrecall train ..."
        )
    if recipe.replicate is None and world % pieces:
        raise UserError(
            f"parallel asks for {asked} = {pieces}, which does not divide the {world} processes; start a multiple of "
            f"{pieces}, or change parallel.shard or parallel.context"
        )
    if recipe.replicate is not None and wanted != world:
        raise UserError(
            f"parallel asks for {asked} = {wanted} processes, but there are {world}; start {wanted}, or leave "
            "parallel.replicate out: it then takes the remaining processes"
        )
    return world // pieces


def leave_group() -> None:
    """Leave the process group, if there is one; all processes do so together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
