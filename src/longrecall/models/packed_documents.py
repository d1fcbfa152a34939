"""Where documents begin in rows that hold several of them, in each of the ways in which callers say so.

Collators without padding put documents side by side. Read as one text, each would start from the state in which the
one before ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.execution import context
from longrecall.ops.packing import check_boundaries

if TYPE_CHECKING:
    from longrecall.ops.context.group import RowPieces

PACKED = ("cu_seq_lens_q", "seq_idx")
"""Arguments of transformers' collators that tell of packed documents."""


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


class Fragments(NamedTuple):
    """N documents that lie side by side, with a row for each.

    Where rows are cut over ranks, it is this rank's part of them: nothing but padding for those that others hold, or
    no row.
    """

    mask: Tensor
    """bool ``[rows, L]``: which are tokens, padding behind them; L is the same on all ranks if each has all rows."""
    document: Tensor
    """int64 ``[B * T]``: the row of every column, one row ``[T]`` after the other."""
    column: Tensor
    """int64 ``[B * T]``: and the column in it."""
    longest: int
    """Tokens of the longest document."""
    pieces: RowPieces | None = None
    """Where ranks share rows and each has rows for the documents alone of which it holds a part: which they are."""

    def apart(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` -> ``[rows, L, ...]``, zeros in the place of padding."""
        rows = x.new_zeros((*self.mask.shape, *x.shape[2:]))
        return rows.index_put((self.document, self.column), x.flatten(0, 1))

    def together(self, x: Tensor, rows: int) -> Tensor:
        """The inverse: ``[rows, L, ...]`` -> ``[B, T, ...]`` with B = `rows`."""
        side_by_side: Tensor = x[self.document, self.column].unflatten(0, (rows, -1))
        return side_by_side


def find_fragments(cu_seqlens: Tensor, rows: int, length: int, every_document: bool = True) -> Fragments:
    """Cut documents at the borders of a rank's piece ``[B, T]`` of its rows, or take whole documents of whole rows.

    Args:
        cu_seqlens: int ``[N + 1]``, their boundaries in the whole rows, one after the other; none lies in two rows.
        rows, length: B and T.
        every_document: whether each rank has a row for every document; else for those with tokens in its piece.

    Raises:
        ValueError: boundaries that do not increase from 0 to B * T, times the ranks that share the rows.
    """
    group = context()
    rank, world = (0, 1) if group is None else (group.rank, group.world)
    whole = world * length
    check_boundaries(cu_seqlens, rows * whole)
    boundaries = cu_seqlens.long()
    row = boundaries[:-1] // whole
    begin, end = boundaries[:-1] - row * whole, boundaries[1:] - row * whole
    # [W, N]: where each document begins and ends in the piece of each rank.
    starts = torch.arange(world, device=boundaries.device)[:, None] * length
    first, last = (edge - starts for edge in (begin, end))
    first, last = first.clamp(0, length), last.clamp(0, length)
    counts = last - first
    own = counts[rank]
    document = torch.repeat_interleave(torch.arange(len(own), device=own.device), own)
    column = torch.arange(rows * length, device=own.device) - (own.cumsum(0) - own)[document]
    longest = int((end - begin).max())
    if every_document or group is None:
        mask = torch.arange(int(counts.max()), device=own.device) < own[:, None]
        return Fragments(mask, document, column, longest)
    from longrecall.ops.context.group import RowPieces

    here = own > 0
    document = (here.cumsum(0) - 1)[document]
    held = here.nonzero()[:, 0]
    mask = torch.arange(int(own.max()), device=own.device) < own[held, None]
    edges = document.view(rows, length)
    goes_on = (begin < rank * length)[held[edges[:, 0]]]
    ends = (end <= (rank + 1) * length)[held]
    pieces = RowPieces(len(own), held, ends, edges[:, 0], edges[:, -1], goes_on)
    return Fragments(mask, document, column, longest, pieces)


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
