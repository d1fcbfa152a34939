"""Writing a checkpoint from a stream of tensors: one layer in memory at a time, complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.models import checkpoint
from longrecall.models.config import RecurrentConfig


def check_places(src: str | Path, dst: str | Path) -> None:
    """Raise UserError when `dst` is `src`, holds it or lies in it: replacing one must not harm the other."""
    if not str(dst).strip():
        raise UserError("the name of the output folder is empty; say where the new checkpoint goes")
    source, target = (Path(os.path.realpath(expand_home(place))) for place in (src, dst))
    if source == target:
        raise UserError(f"{dst} is the source itself; surgery never changes its input, give another output folder")
    if target in source.parents:
        raise UserError(f"{dst} contains the source {src}, which would be replaced; give another output folder")
    if source in target.parents:
        raise UserError(f"{dst} lies inside the source {src}; give an output folder outside it")


def write_checkpoint(
    source: checkpoint.Checkpoint,
    dst: str | Path,
    config: RecurrentConfig,
    tensors: Iterable[tuple[str, Tensor]],
    records: Callable[[], Sequence[dict[str, Any]]],
    *,
    force: bool,
    with_code: bool = False,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a native checkpoint to `dst` with `source`'s companion files, a fresh model card and surgery records.

    With `with_code` it brings code along by which transformers finds longrecall. In memory are `max_shard_bytes`
    (None = `checkpoint.DEFAULT_SHARD_BYTES`).

    `tensors` is consumed one at a time; `records` is called last, since a source hash reads every file. Raises
    UserError when `dst` cannot take it, before the first tensor is read; `dst` ends complete or as it was.
    """
    check_places(source.path, dst)
    most = checkpoint.DEFAULT_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
    with checkpoint.CheckpointWriter(dst, force=force, max_shard_bytes=most) as writer:
        writer.set_config(config)
        for name, tensor in tensors:
            writer.add(name, tensor)
            # Gone before the next one is read.
            del tensor
        writer.set_surgery(records())
        writer.set_origin(source.origin)
        if with_code:
            writer.bring_code()
        writer.add_companions(source.companion_files())
