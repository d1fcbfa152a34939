"""From a resumable checkpoint to the native checkpoint that everything else reads, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.models.checkpoint import DEFAULT_SHARD_BYTES, Checkpoint, open_checkpoint
from longrecall.models.fingerprints import fingerprint
from longrecall.surgery.handover import finish_handover, finish_records, handover_layers
from longrecall.surgery.streaming import write_checkpoint
from longrecall.training.checkpoints.saved_run import STEPS_FOLDER, SavedRun, find_saved_runs, saved_run
from longrecall.units import format_bytes

FEWEST_BYTES = 1 << 24
"""A weight file is begun anew before it has four times the bytes of the largest tensor, but holds at least so many."""

_EMBEDDINGS, _HEAD = "model.embeddings.weight", "lm_head.weight"
_PROGRESS = "model.layers.{}.mixer.progress"


@dataclass(frozen=True)
class Consolidation:
    """What `consolidate` has done.

    Attributes:
        source: the step that was read.
        output: the checkpoint that was written.
        step: optimizer steps that it has had.
        processes: that had saved it.
        tensors, bytes: of the weights that were written.
        finished: layers whose handover was complete; their old paths were left out.
        handing_over: layers in the middle of theirs, which were kept as they are.
    """

    source: str
    output: str
    step: int
    processes: int
    tensors: int
    bytes: int
    finished: tuple[int, ...]
    handing_over: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def table(self) -> str:
        """A few lines for people."""
        rows = [
            ("step", f"{self.step:,}"),
            ("saved by", f"{self.processes} process" + ("es" if self.processes > 1 else "")),
            ("tensors", f"{self.tensors:,}"),
            ("weights", format_bytes(self.bytes)),
        ]
        if self.finished:
            rows.append(("handover finished", f"layers {', '.join(map(str, self.finished))}"))
        if self.handing_over:
            rows.append(("handover goes on", f"layers {', '.join(map(str, self.handing_over))}"))
        return "\n".join(f"{name:<18} {value}" for name, value in rows)


def consolidate(run: str | Path, out: str | Path, *, force: bool = False) -> Consolidation:
    """Write a saved step of a run as a native checkpoint; in memory are a few of its largest tensors at most.

    Handovers that are complete are finished: their old paths are left out. A step in the middle of one keeps both.

    Args:
        run: the output folder of a run, whose newest complete step is taken, or the folder of one step.
        out: the folder to write; complete at the end, or not there.
        force: replace `out` when it exists.

    Raises:
        UserError: no such run, no complete step, a damaged file, or an `out` that cannot be written.
    """
    saved = _choose(expand_home(run))
    source = open_checkpoint(saved.folder)
    layers = handover_layers(source.config)
    complete = all(float(source.read(_PROGRESS.format(layer))) == 1.0 for layer in layers)
    write_final(saved.folder, out, force=force, finish=complete)
    written = open_checkpoint(out)
    return Consolidation(
        source=str(saved.folder),
        output=str(out),
        step=saved.step,
        processes=saved.world,
        tensors=len(written.names()),
        bytes=sum(_bytes(written, name) for name in written.names()),
        finished=layers if complete else (),
        handing_over=() if complete else layers,
    )


def write_final(step: Path, out: str | Path, *, force: bool, finish: bool = True) -> None:
    """Write the folder of a step, sharded or not, as a native checkpoint, tensor by tensor.

    Args:
        step: a complete resumable checkpoint.
        out: the folder to write.
        force: replace it when it exists.
        finish: leave out the old paths of handover layers, which must be complete.

    Raises:
        UserError: a damaged file, an unfinished handover, or an `out` that cannot be written.
    """
    source = open_checkpoint(step)
    largest = max(_bytes(source, name) for name in source.names())
    most = min(DEFAULT_SHARD_BYTES, max(FEWEST_BYTES, 4 * largest))
    config, layers = source.config, handover_layers(source.config) if finish else ()
    tensors: Iterable[tuple[str, Tensor]] = ((name, source.read(name)) for name in source.names())
    if layers:
        config, tensors = finish_handover(config, source)
    records = partial(finish_records, source.surgery, layers)
    write_checkpoint(source, out, config, tensors, records, force=force, max_shard_bytes=most)


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """Return the fingerprint of the model that a checkpoint loads as; one of its tensors is in memory at a time."""
    tied = checkpoint.config.tie_word_embeddings

    def read(name: str) -> Tensor:
        return checkpoint.read(_EMBEDDINGS if tied and name == _HEAD else name)

    return fingerprint(checkpoint.config, {*checkpoint.names(), _HEAD}, read)


def _choose(place: Path) -> SavedRun:
    """The step that `place` is, or the newest complete one of the run that it is."""
    if not place.is_dir():
        raise UserError(
            f"{place} is not a folder; name the output folder of a run, or one of its {STEPS_FOLDER}/step-..."
        )
    if (one := saved_run(place)) is not None:
        return one
    found = find_saved_runs(place)
    if not found:
        raise UserError(
            f"{place} holds no complete resumable checkpoint; name the output folder of a run, or one of its "
            f"{STEPS_FOLDER}/step-... folders"
        )
    return found[-1]


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    return math.prod(checkpoint.shape(name)) * checkpoint.dtype(name).itemsize
