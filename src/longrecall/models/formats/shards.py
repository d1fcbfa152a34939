"""Writes safetensors files of bounded size, tensor by tensor; at the end they get their names and an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from longrecall.errors import UserError
from longrecall.files import make_readable
from longrecall.models.formats.weights import SAFETENSORS_FILE, SAFETENSORS_INDEX
from longrecall.new_folder import NewFolder

if TYPE_CHECKING:
    from torch import Tensor


class ShardWriter:
    """Weight files in the making; in memory is one of them.

    Args:
        folder: where to; it is there when the first file is full.
        max_bytes: a new file begins before this size is passed; a larger tensor gets a file of its own.
        out: what errors call the place.
    """

    def __init__(self, folder: Path, max_bytes: int, out: Path) -> None:
        self.folder = folder
        self.placed: dict[str, int] = {}
        self._max_bytes = max_bytes
        self._out = out
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._parts = 0
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor (any device; it is copied). UserError when the name was given before, or the disk is full."""
        if name in self.placed:
            raise UserError(f'tensor "{name}" was given twice')
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + size > self._max_bytes:
            self._flush()
        # A copy of its own: the caller may reuse the memory, and safetensors refuses views that share storage. Not of
        # one that is written before the caller goes on: the experts of a layer take gigabytes.
        fills = not self._shard and size >= self._max_bytes
        self._shard[name] = tensor.detach().to("cpu", copy=not fills).contiguous()
        self._shard_bytes += size
        self._bytes += size
        self.placed[name] = self._parts
        if fills:
            self._flush()

    def finish(self) -> None:
        """Write what is left, and give the files their final names, now that their number is known."""
        self._flush()
        parts = sorted(self.folder.glob("part-*.safetensors"))
        if len(parts) == 1:
            parts[0].rename(self.folder / SAFETENSORS_FILE)
        if len(parts) < 2:
            return
        final = [f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
        for part, name in zip(parts, final, strict=True):
            part.rename(self.folder / name)
        weight_map = {name: final[shard] for name, shard in sorted(self.placed.items())}
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        (self.folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if self._shard:
            from safetensors.torch import save_file

            path = self.folder / f"part-{self._parts:05d}.safetensors"
            with disk_errors(self._out):
                save_file(self._shard, path, metadata={"format": "pt"})
                make_readable(path)
            self._parts += 1
        self._shard, self._shard_bytes = {}, 0


@contextmanager
def new_checkpoint_folder(out: str | Path, force: bool) -> Iterator[Path]:
    """Give a folder to write a checkpoint into; at the end of the block it stands at `out`, after an exception nowhere.

    Raises:
        UserError: `out` is in the way, inside another checkpoint, being written, or cannot be written.
    """
    place = NewFolder(out, force)
    with disk_errors(place.out):
        place.open()
    try:
        yield place.folder
        with disk_errors(place.out):
            place.put()
    finally:
        place.close()


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn what the operating system says about writing `out` into one line for the user."""
    try:
        yield
    except UserError:
        raise
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {reason_of(error)}; nothing was left there") from None


def reason_of(error: Exception) -> str:
    """Return what the system says against writing a file, without the words of the library that was told."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # safetensors reports a full disk as its own error type, with the system's words inside.
    return re.sub(r"^.*?I/?[oO] error:\s*", "", str(error)) if isinstance(error, SafetensorError) else str(error)
