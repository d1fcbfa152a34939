"""What all processes of a run must have in common before anything heavy starts: the recipe, and the output folder."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longrecall.training.checkpoints import flatten
from longrecall.training.parallel.place import Place

PATIENCE = 5.0
"""Seconds that a network file system may take to show a new file everywhere."""


def check_same_run(place: Place, recipe: Mapping[str, Any], **options: Any) -> None:
    """Refuse processes that were started with different recipes or options; the line names the first difference.

    Raises:
        UserError: the same in all processes.
    """
    own = flatten({"recipe": recipe} | options)
    # A digest first: with a thousand processes whole recipes would be a thousand times a thousand.
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()
    digests = place.gather(digest)
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return
    found = place.gather(own if place.rank in (0, other) else None)
    first, second = found[0], found[other]
    key = next(key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key))
    place.refuse_together(
        f"the processes were started differently: {key.removeprefix('recipe.')} is {second.get(key)!r} in process "
        f"{other} and {first.get(key)!r} in process 0; start all of them with the same recipe and options"
    )


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
            else f"run.output {folder} of process {place.rank} ({socket.gethostname()}) is not the folder that process "
            "0 writes to: give a path on a file system that all processes share, and start them in the same folder"
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
