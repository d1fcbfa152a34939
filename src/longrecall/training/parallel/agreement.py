"""What all processes of a run must have in common before anything heavy starts: recipe, files, output folder."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longrecall.models.checkpoint import Checkpoint
from longrecall.training.checkpoints import flatten
from longrecall.training.parallel.place import Place

PATIENCE = 5.0
"""Seconds that a network file system may take to show a new file everywhere."""

_PLACES, _PLACE_BYTES = 16, 4096
"""Of a file that is compared: how many places, and the bytes of each."""


def check_same_run(place: Place, recipe: Mapping[str, Any], **options: Any) -> None:
    """Refuse processes that were started with different recipes or options; the line names the first difference.

    Raises:
        UserError: the same in all processes.
    """
    found = _first_difference(place, flatten({"recipe": recipe} | options))
    if found is not None:
        key, other, first, second = found
        place.refuse_together(
            f"the processes were started differently: {key.removeprefix('recipe.')} is {second!r} in process {other} "
            f"and {first!r} in process 0. Start all of them with the same recipe and options"
        )


def check_same_files(place: Place, checkpoint: Checkpoint, amounts: Sequence[Any]) -> None:
    """Refuse processes that find other files under the same names, as where one machine's disk has an older copy.

    Of weights a few places are compared, of data what `BatchStream.position` says of its amount.

    Raises:
        UserError: the same in all processes; it names a file or a source of data.
    """
    if place.world == 1:
        return
    files = {f"model.checkpoint {path.name}": _traces(path) for path in checkpoint.files() if path.suffix != ".md"}
    sources = {f"data.sources.{number}": list(amount) for number, amount in enumerate(amounts)}
    found = _first_difference(place, files | sources)
    if found is not None:
        key, other, _, _ = found
        place.refuse_together(
            f"{key} of process {other} is not that of process 0: give a path on a file system that all processes "
            "share, or the same files everywhere"
        )


def _first_difference(place: Place, own: Mapping[str, Any]) -> tuple[str, int, Any, Any] | None:
    """Return what is not alike in all processes: its key, a process that differs from the first, and both values."""
    # A digest first: with a thousand processes all of it would be a thousand times a thousand.
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()
    digests = place.gather(digest)
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return None
    found = place.gather(own if place.rank in (0, other) else None)
    first, second = found[0], found[other]
    key = next(key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key))
    return key, other, first.get(key), second.get(key)


def _traces(path: Path) -> list[Any]:
    """Return the size of a file and a digest of some places in it: other weights differ everywhere."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_PLACES):
            file.seek(max(0, size - _PLACE_BYTES) * number // (_PLACES - 1))
            digest.update(file.read(_PLACE_BYTES))
    return [size, digest.hexdigest()]


def check_shared_folder(place: Place, folder: Path) -> None:
    """Refuse an output folder that is not the same one in every process.

    Raises:
        UserError: the same in all processes; it names a process that does not see what the first one writes.
    """
    if place.world == 1:
        return
    name, writing = None, None
    if place.first:
        name = f".seen-by-all-{os.getpid()}-{time.time_ns()}"
        try:
            (folder / name).write_text("", encoding="utf-8")
        except OSError as error:
            writing = f"{folder} cannot be written: {error.strerror}; choose another run.output"
    name = place.gather(name)[0]
    try:
        place.refuse_together(writing)
        seen = _appears(folder / str(name))
        refusal = (
            None
            if seen
            else f"run.output {folder} of process {place.rank} ({socket.gethostname()}) is not the folder that "
            "process 0 writes to. Give a path on a file system that all processes share, and start them in the "
            "same folder"
        )
        place.refuse_together(refusal)
    finally:
        if place.first:
            (folder / str(name)).unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes within `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
