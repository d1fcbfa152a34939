"""Where documents begin in rows that hold several of them, in each of the ways in which callers say so.

Collators without padding put documents side by side. Read as one text, each would start from the state in which the
one before ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.packing import check_boundaries, document_mask, unpack


def find_documents(
    rows: int, columns: int, mask: Tensor | None, position_ids: Tensor | None, named: Mapping[str, Any]
) -> Tensor | None:
    """The boundaries of documents in rows ``[B, T]``, as transformers' collators tell them; None = every row is one.

    Args:
        rows, columns: B and T.
        mask: bool ``[B, T]``, False = padding; None = all are real.
        position_ids: ``[B, T]`` or ``[1, T]``; where it does not grow, a new document begins.
        named: further arguments of a model's forward pass: `cu_seq_lens_q` ``[N + 1]`` (B = 1) or `seq_idx` ``[B, T]``,
            the number of each token's document.

    Returns:
        int64 ``[N + 1]``, as `cu_seqlens` of all rows one after the other.

    Raises:
        ValueError: arguments of other shapes, or several documents in rows with padding.
    """
    ends = named.get("cu_seq_lens_q")
    if ends is not None:
        if rows != 1:
            raise ValueError(f"cu_seq_lens_q packs documents into one row; got {rows} rows")
        return torch.as_tensor(ends).long() if len(ends) > 2 else None
    places = named.get("seq_idx")
    places, kind = (position_ids, "position_ids") if places is None else (places, "seq_idx")
    if places is None or columns < 2:
        return None
    if places.ndim != 2 or places.shape[0] not in (1, rows) or places.shape[1] != columns:
        raise ValueError(f"{kind} must be [{rows}, {columns}]; got {list(places.shape)}")
    places = places.expand(rows, columns)
    if mask is not None:
        _refuse_documents_among_padding(places[mask], mask.nonzero()[:, 0], kind)
        return None
    starts = F.pad(_begins(places[:, 1:], places[:, :-1], kind), (1, 0), value=False)
    if not bool(starts.any()):
        return None
    starts[:, 0] = True
    first = starts.flatten().nonzero()[:, 0]
    return F.pad(first, (0, 1), value=rows * columns)


def apart(x: Tensor, ids: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows of documents side by side -> one document a row, and which of its tokens are real.

    x ``[B, T, d]``, ids ``[B, T]``, `cu_seqlens` ``[N + 1]`` -> ``[N, L, d]``, ``[N, L]``, bool ``[N, L]``. ValueError:
    boundaries that do not increase from 0 to B * T.
    """
    check_boundaries(cu_seqlens, x.shape[0] * x.shape[1])
    ids = None if ids is None else unpack(ids.reshape(1, -1), cu_seqlens)
    return unpack(x.reshape(1, -1, x.shape[-1]), cu_seqlens), ids, document_mask(cu_seqlens)


def _begins(places: Tensor, before: Tensor, kind: str) -> Tensor:
    return places != before if kind == "seq_idx" else places <= before


def _refuse_documents_among_padding(places: Tensor, rows: Tensor, kind: str) -> None:
    """ValueError if the real tokens' `places`, row by row, tell of several documents in a row."""
    begins = _begins(places[1:], places[:-1], kind) & (rows[1:] == rows[:-1])
    if bool(begins.any()):
        raise ValueError(
            f"{kind} puts several documents into a row that has padding too; leave out the padding, or give every "
            "document a row"
        )
