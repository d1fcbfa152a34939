"""One number for what a model computes, from its tensors one at a time, wherever they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from longrecall.models.captured_steps import parts_of
from longrecall.models.config import RecurrentConfig


def fingerprint(config: RecurrentConfig, names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Return the SHA-256 (hex) over the layers and every tensor: equal only for models that compute the same.

    Args:
        config: of the model.
        names: of all tensors of its `state_dict`.
        read: gives one of them.
    """
    digest = hashlib.sha256(json.dumps(config.layers, sort_keys=True).encode())
    for name, value in config.added().items():
        digest.update(f"{name} {json.dumps(value, sort_keys=True)}".encode())
    for name in sorted(names):
        tensor = read(name).detach()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        for part in parts_of(tensor):
            if part is not tensor:  # of a quantised weight: the bytes alone would be those of another kind, too
                digest.update(f"{type(tensor).__name__} {part.dtype} {list(part.shape)}".encode())
            digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
