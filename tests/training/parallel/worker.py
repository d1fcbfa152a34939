"""Runs recipes on forked processes: what torchrun does, without importing everything once more for each of them.

Each folder holds `r.yaml` (or one for a process, `r-<rank>.yaml`) and `world`, the number of processes, which stand in
that folder, or in its `rank-<rank>`. Beside the run lie ``gradients.pt``, the gradients of every step before clipping,
and ``state-<rank>.pt``, the initial state at the end; or ``refused-<rank>.json``, if the run was refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch._dynamo.backends.debugging import aot_eager

from longrecall.errors import RefusedTogether
from longrecall.models import compiling
from longrecall.training.job import Job
from longrecall.training.parallel import agreement
from longrecall.training.parallel.shard import whole
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from longrecall.training.trainer import RecurrentTrainer
from tests.processes import on_processes


def train(folder: Path) -> None:
    """Run one folder's recipe and write what the test compares."""
    gradients: list[dict[str, torch.Tensor]] = []
    jobs: list[Job] = []
    original = RecurrentTrainer._clip_grad_norm

    def clip(self: RecurrentTrainer, model: Any) -> Any:
        jobs[:] = [self.job]
        named = self.job.model.named_parameters()
        gradients.append({name: whole(p.grad).clone() for name, p in named if p.grad is not None})
        return original(self, model)

    rank = int(os.environ["RANK"])
    own, place = folder / f"r-{rank}.yaml", folder / f"rank-{rank}"
    os.chdir(place if place.exists() else folder)
    RecurrentTrainer._clip_grad_norm = clip
    try:
        run_recipe(Recipe.load(own if own.exists() else folder / "r.yaml"), show_progress=False)
    except RefusedTogether as error:
        told = {"line": str(error), "told_here": error.told_here}
        (folder / f"refused-{rank}.json").write_text(json.dumps(told))
        return
    finally:
        RecurrentTrainer._clip_grad_norm = original
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    torch.save(jobs[0].initial.state_dict(), folder / f"state-{rank}.pt")


def main(*names: str) -> None:
    agreement.PATIENCE = 0.3
    folders = [Path(name) for name in names]
    worlds = {folder: int((folder / "world").read_text()) for folder in folders}
    for world in sorted(set(worlds.values())):
        mine = [folder for folder in folders if worlds[folder] == world]

        def work(mine: list[Path] = mine) -> None:
            for folder in mine:
                train(folder)

        on_processes(world, work)


def compiled(*names: str) -> None:
    """As `main`, with a compiler that traces both passes and makes no code; in each folder it counts."""

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        for name in names:
            with (Path(name) / f"compiled-{os.environ['RANK']}").open("a") as file:
                file.write("1")
        return aot_eager(graph, inputs, **options)

    compiling.BACKEND = counting
    main(*names)
