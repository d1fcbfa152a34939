"""Packed documents: several sequences side by side in one row, cut at `cu_seqlens`."""

from __future__ import annotations

import torch
from torch import Tensor


def check_boundaries(cu_seqlens: Tensor, length: int) -> None:
    """Raise ValueError unless `cu_seqlens` is an increasing integer vector from 0 to `length`."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be an integer vector of at least 2 entries; got {cu_seqlens}")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != length or bool((cu_seqlens.diff() <= 0).any()):
        raise ValueError(f"cu_seqlens must increase from 0 to {length}; got {cu_seqlens.tolist()}")


def unpack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``[1, T, ...]`` -> ``[N, longest, ...]``: one row per document, padded at the end with zeros."""
    rows, columns, lengths = _coordinates(cu_seqlens)
    padded = x.new_zeros((len(lengths), int(lengths.max()), *x.shape[2:]))
    return padded.index_put((rows, columns), x[0])


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The inverse of `unpack`: ``[N, longest, ...]`` -> ``[1, T, ...]``."""
    rows, columns, _ = _coordinates(cu_seqlens)
    return x[rows, columns][None]


def document_mask(cu_seqlens: Tensor) -> Tensor:
    """Which positions of `unpack`'s result are real: bool ``[N, longest]``."""
    lengths = cu_seqlens.diff()
    return torch.arange(int(lengths.max()), device=cu_seqlens.device) < lengths[:, None]


def _coordinates(cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cu_seqlens = cu_seqlens.long()
    lengths = cu_seqlens.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    columns = torch.arange(int(cu_seqlens[-1]), device=lengths.device) - cu_seqlens[:-1][rows]
    return rows, columns, lengths
