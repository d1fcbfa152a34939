"""Several processes that share one evaluation, as ``torchrun`` starts them: each reads its share, the first writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longrecall.errors import UserError
from longrecall.outputs import claim_file

# Shares of one work can differ by hours; a process that has died is torchrun's to notice.
_PATIENCE = timedelta(days=7)
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among all: number `rank` of `count`, and `local` on its machine."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def share(self, indexes: Sequence[int], align: int) -> list[int]:
        """Return this process's part of `indexes` (ascending): neighbours, which may share what they begin with.

        Parts are cut only at multiples of `align`.
        """
        blocks = sorted({index // align for index in indexes})
        mine = set(blocks[len(blocks) * self.rank // self.count : len(blocks) * (self.rank + 1) // self.count])
        return [index for index in indexes if index // align in mine]

    def gather(self, data: Any) -> list[Any]:
        """Return what every process gave, in order of rank; all must call it."""
        if self.count == 1:
            return [data]
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, data)
        return parts

    @contextlib.contextmanager
    def claim(self, out: str | Path | None, *, force: bool, resume: bool) -> Iterator[None]:
        """Claim `out` (`outputs.claim_file`) for all processes inside the block: the first one holds it.

        All must call it, and all are refused together: none is left to wait for one that has ended.
        """
        with contextlib.ExitStack() as held:
            refusal = None
            if self.first:
                try:
                    held.enter_context(claim_file(out, force=force, resume=resume))
                except UserError as error:
                    refusal = str(error)
            refusal = self.gather(refusal)[0]
            if refusal is not None:
                raise UserError(refusal)
            yield

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def device(self, asked: str | None) -> str | None:
        """Return the device for this process: its own GPU where several share a machine and no number is asked for."""
        if self.count > 1 and asked in (None, "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local % torch.cuda.device_count()}"
        return asked


@contextlib.contextmanager
def torchrun_ranks() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started with this one; without it, be alone.

    Only plain Python values are exchanged, so the processes talk through gloo, on GPUs too. Raises `UserError` when the
    environment is only half of what torchrun sets.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is set, but {', '.join(missing)} is not; start several processes with torchrun, "
            "or unset WORLD_SIZE"
        )
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    finally:
        dist.destroy_process_group()
