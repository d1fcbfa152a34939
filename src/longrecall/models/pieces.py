"""A model's call under context parallelism: every rank has a piece of each row and needs to know of the whole rows.

Pieces are contiguous and of equal length: rank r of W has columns r * T to (r + 1) * T - 1 of rows of W * T columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrecall.errors import UserError
from longrecall.layers.mixers.base import LayerState
from longrecall.models.packed_documents import find_documents
from longrecall.models.sizes import ModelSizes
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import context, row_pieces, states_are_unread
from longrecall.ops.neighbours import all_columns


def agreed_mask(x: Tensor, mask: Tensor | None, given: Mapping[str, Any], layers: Iterable[nn.Module]) -> Tensor | None:
    """The mask of this rank's piece: None where no rank has padding.

    Args:
        x: token ids ``[B, T]`` or embeddings ``[B, T, d]``.
        mask: bool ``[B, T]``, False = padding; None = this piece has none.
        given: arguments by name, each of which all ranks must have or none.
        layers: of the model that is called.

    Raises:
        UserError: the ranks were given pieces of other shapes, or not the same arguments; layers are compiled.
    """
    group = context()
    if group is None:
        return mask
    if any(layer._compiled_call_impl is not None for layer in layers):
        raise UserError(
            "compiled layers do not run under context parallelism: the compiler does not see that sequences are split; "
            "leave out compile()"
        )
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


class Counts(NamedTuple):
    """Real tokens that rows have read, int64 ``[B]``."""

    position: Tensor
    """Before this rank's piece."""
    after: Tensor
    """After the whole rows."""
    columns: int
    """Columns of the whole rows, padding included."""


def count_tokens(position: Tensor, length: int, mask: Tensor | None) -> Counts:
    """What rows that had read `position` ``[B]`` tokens read of `length` columns, bool mask ``[B, T]`` or None."""
    group = context()
    if group is None:
        return Counts(position, position + (length if mask is None else mask.sum(1)), length)
    columns = group.world * length
    if mask is None:
        return Counts(position + group.rank * length, position + columns, columns)
    read = all_columns(mask.sum(1)[:, None])
    return Counts(position + read[:, : group.rank].sum(1), position + read.sum(1), columns)


def states_of_last(x: Tensor, states: Sequence[LayerState], config: ModelSizes) -> tuple[Tensor, list[LayerState]]:
    """The states of the layers of `config` after the last rank's piece, on every rank.

    Returns x, which is to be used instead, and the states. Caches with a column for each token are whole already.
    Where nobody reads the states, they stay those after this rank's piece; so do those of documents
    (`states_of_documents`).
    """
    if context() is None or row_pieces() is not None or states_are_unread():
        return x, list(states)
    places = [
        (index, name)
        for index, (state, layer) in enumerate(zip(states, config.layer_configs(), strict=True))
        for name, shape in layer.state_shapes().items()
        if name in state and 0 not in shape
    ]
    from longrecall.ops.context.exchange import from_last

    x, *last = from_last(x, *(states[index][name] for index, name in places))
    found = [dict(state) for state in states]
    for (index, name), tensor in zip(places, last, strict=True):
        found[index][name] = tensor
    return x, found


def has_every_document(config: ModelSizes) -> bool:
    """Whether a model reads packed documents with a row for every one, also on ranks that hold no part of it.

    So it is where a layer of `config` keeps or looks up columns: ranks gather those of the same rows.
    """
    if context() is None:
        return True
    shapes = (shape for layer in config.layer_configs() for shape in layer.state_shapes().values())
    return config.reads_tokens() or any(0 in shape for shape in shapes)


def states_of_documents(x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """The states of all N documents, each from the rank on which it ends, from those of this rank's documents.

    For use inside `row_pieces`. Returns x, which is to be used instead, and the states. Where nobody reads the states,
    they stay those of this rank's documents.
    """
    if context() is None or row_pieces() is None or states_are_unread():
        return x, state
    from longrecall.ops.context.exchange import from_ends

    places = [(index, name) for index, layer in enumerate(state.layers) for name in layer]
    x, position, *ended = from_ends(x, state.position, *(state.layers[index][name] for index, name in places))
    layers: list[LayerState] = [{} for _ in state.layers]
    for (index, name), tensor in zip(places, ended, strict=True):
        layers[index][name] = tensor
    return x, replace(state, layers=tuple(layers), position=position)


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
