"""Writes `pytorch_model.bin`, tensor by tensor, for libraries that load nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from longrecall.models.formats.shards import disk_errors
from longrecall.models.formats.weights import TORCH_FILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TorchFileWriter:
    """A torch file in the making: tensors wait in files of their own, so that memory holds one of them.

    Args:
        folder: where to.
        out: what errors call the place.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self._folder = folder
        self._out = out
        self._waiting: dict[str, tuple[Path, tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; UserError when the disk is full."""
        import torch

        path = self._folder / f"tensor-{len(self._waiting):06d}.raw"
        plain = tensor.detach().to("cpu").contiguous()
        with disk_errors(self._out):
            plain.flatten().view(torch.uint8).numpy().tofile(path)
        self._waiting[name] = path, tuple(plain.shape), plain.dtype

    def finish(self) -> None:
        """Write the file and remove what waited."""
        import torch

        with disk_errors(self._out):
            # Mapped: the numbers go from file to file, a page at a time.
            tensors = {
                name: torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=dtype).reshape(shape)
                for name, (path, shape, dtype) in self._waiting.items()
            }
            torch.save(tensors, self._folder / TORCH_FILE)
            del tensors
            for path, _, _ in self._waiting.values():
                path.unlink()
