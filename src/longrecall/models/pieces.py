"""A model's call under context parallelism: every rank has a piece of each row and needs to know of the whole rows.

Pieces are contiguous and of equal length: rank r of W has columns r * T to (r + 1) * T - 1 of rows of W * T columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.layers.mixers.base import LayerState
from longrecall.models.packed_documents import find_documents
from longrecall.models.sizes import ModelSizes
from longrecall.ops.execution import context, states_are_unread
from longrecall.ops.neighbours import all_columns


def agreed_mask(x: Tensor, mask: Tensor | None, given: Mapping[str, Any]) -> Tensor | None:
    """The mask of this rank's piece: None where no rank has padding.

    Args:
        x: the embeddings ``[B, T, d]``.
        mask: bool ``[B, T]``, False = padding; None = this piece has none.
        given: arguments by name, each of which all ranks must have or none.

    Raises:
        UserError: the ranks were given pieces of other shapes, or not the same arguments.
    """
    group = context()
    if group is None:
        return mask
    own = [*x.shape[:2], *(value is not None for value in given.values()), mask is not None]
    every = all_columns(torch.tensor([[own]], dtype=torch.int64, device=x.device))[0].tolist()
    for place, name in enumerate(("rows", "columns", *given)):
        values = [row[place] for row in every]
        if len(set(values)) > 1:
            found = values if place < 2 else ["given" if value else "missing" for value in values]
            raise UserError(
                "the ranks of a context group read equal pieces of a sequence with the same arguments; got "
                f"{name} {', '.join(map(str, found))} on ranks 0 to {group.world - 1}"
            )
    padded = any(row[-1] for row in every)
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if padded and mask is None else mask


@dataclass(frozen=True)
class Counts:
    """Real tokens of every row: int64 ``[B]``, or one number where no row has padding."""

    before: Tensor | int
    """On the ranks before this one."""
    total: Tensor | int
    """On all ranks."""
    columns: int
    """Columns of the whole rows, padding included."""


def count_tokens(length: int, mask: Tensor | None) -> Counts:
    """What rows of `length` columns, bool mask ``[B, T]`` or None, are part of."""
    group = context()
    if group is None:
        return Counts(0, length if mask is None else mask.sum(1), length)
    columns = group.world * length
    if mask is None:
        return Counts(group.rank * length, columns, columns)
    read = all_columns(mask.sum(1)[:, None])
    return Counts(read[:, : group.rank].sum(1), read.sum(1), columns)


def states_of_last(x: Tensor, states: Sequence[LayerState], config: ModelSizes) -> tuple[Tensor, list[LayerState]]:
    """The states of the layers of `config` after the last rank's piece, on every rank.

    Returns x, which is to be used instead, and the states. Caches with a column for each token are whole already.
    Where nobody reads the states, they stay those after this rank's piece.
    """
    if context() is None or states_are_unread():
        return x, list(states)
    places = [
        (index, name)
        for index, (state, layer) in enumerate(zip(states, config.layer_configs(), strict=True))
        for name, shape in layer.state_shapes().items()
        if name in state and 0 not in shape
    ]
    from longrecall.context.exchange import from_last

    x, *last = from_last(x, *(states[index][name] for index, name in places))
    found = [dict(state) for state in states]
    for (index, name), tensor in zip(places, last, strict=True):
        found[index][name] = tensor
    return x, found


def with_next_label(labels: Tensor) -> Tensor:
    """Labels ``[B, T]`` and behind them the first of the next rank, which the last token of a piece predicts.

    -100 on the last rank; as they are where sequences are whole.
    """
    group = context()
    if group is None:
        return labels
    firsts = all_columns(labels[:, :1].contiguous())
    after = firsts[:, group.rank + 1 :][:, :1] if not group.last else torch.full_like(labels[:, :1], -100)
    return torch.cat([labels, after], dim=1)


def find_all_documents(
    rows: int, columns: int, mask: Tensor | None, position_ids: Tensor | None, named: Mapping[str, Any]
) -> Tensor | None:
    """`find_documents` for the whole rows; `columns`, `mask` and what has a column for each token are of the piece."""
    group = context()
    if group is None:
        return find_documents(rows, columns, mask, position_ids, named)
    whole = dict(named)
    if named.get("seq_idx") is not None:
        whole["seq_idx"] = all_columns(named["seq_idx"].contiguous())
    position_ids = None if position_ids is None else all_columns(position_ids.contiguous())
    mask = None if mask is None or (position_ids is None and "seq_idx" not in whole) else all_columns(mask)
    return find_documents(rows, group.world * columns, mask, position_ids, whole)
