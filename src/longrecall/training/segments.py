"""Batches whose documents are kept apart: the pieces between document starts, side by side, each with its own state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from longrecall.context import ContextGroup, context_parallel
from longrecall.layers.mixers.base import LayerState
from longrecall.models.losses import label_count
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states import InitialState
from longrecall.training.initial_states.base import keep_rows, without_rows
from longrecall.training.leash import LeashedBatch
from longrecall.training.sending import send


@dataclass(frozen=True)
class Segments:
    """N pieces of the B rows of a batch, in reading order; a row has at least one.

    Attributes:
        rows, length: B and T of the batch.
        row: int64 ``[N]``: the row that a piece lies in.
        begin: int64 ``[N]``: its first column.
        opens: bool ``[N]``: a document starts here; False for a row that goes on from the batch before.
    """

    rows: int
    length: int
    row: Tensor
    begin: Tensor
    opens: Tensor

    @classmethod
    def of(cls, starts: Sequence[Sequence[int]], length: int) -> Segments:
        """Cut rows of `length` columns at `starts`: for every row the columns, ascending, where documents start."""
        pieces = [
            (row, begin, begin in columns)
            for row, columns in enumerate(starts)
            for begin in dict.fromkeys((0, *columns))
        ]
        row, begin, opens = zip(*pieces, strict=True)
        return cls(len(starts), length, torch.tensor(row), torch.tensor(begin), torch.tensor(opens))

    @property
    def whole_rows(self) -> bool:
        """Whether every row is one piece."""
        return len(self.row) == self.rows

    def inputs(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model for int64 ``[B, T]``: as they are, or packed into one row.

        The first token of a row, which nothing predicts, has no label then either: the mean loss is the same.
        """
        if self.whole_rows:
            return {"input_ids": input_ids, "labels": labels}
        first = torch.arange(self.length, device=labels.device) == 0
        ends = torch.tensor([self.rows * self.length])
        return {
            "input_ids": input_ids.reshape(1, -1),
            "labels": labels.masked_fill(first, -100).reshape(1, -1),
            "cu_seqlens": send(torch.cat([self.row * self.length + self.begin, ends]), input_ids.device),
        }

    def spread(
        self, state: RecurrentState, continues: bool, beginning: Callable[[int], RecurrentState] | None = None
    ) -> RecurrentState:
        """Return the state of N pieces from one of B rows: the row's for its first piece, zeros for the others.

        With `continues` a document that starts with its row starts from zeros too. `beginning`: makes the state before
        the first token of so many rows, where that is not zeros (memory tokens).
        """
        keep = (self.begin == 0) & ~(self.opens & continues)
        spread = state if self.whole_rows else state.select_rows(self.row)
        if bool(keep.all()):
            return spread
        keep = send(keep, spread.position.device)
        layers = tuple(without_rows(layer, keep) for layer in spread.layers)
        if beginning is not None:
            fresh = beginning(len(keep)).layers
            each = zip(layers, spread.layers, fresh, strict=True)
            layers = tuple(old | _begun(layer, start, keep) for old, layer, start in each)
        return replace(spread, layers=layers, position=keep_rows(spread.position, keep))

    def ends(self, final: RecurrentState) -> RecurrentState:
        """Return the states in which the B rows ended from those of the N pieces."""
        if self.whole_rows:
            return final
        last = torch.searchsorted(self.row, torch.arange(self.rows), right=True) - 1
        return final.select_rows(last)


def _begun(layer: LayerState, start: LayerState, keep: Tensor) -> LayerState:
    """What is no cache of a layer's state: the rows where bool `keep` ``[N]``, those of `start` elsewhere."""
    fixed = [name for name, tensor in layer.items() if tensor.shape == start[name].shape]
    return {name: keep_rows(layer[name], keep, start[name]) for name in fixed}


def _beginning(model: nn.Module) -> Callable[[int], RecurrentState] | None:
    """What makes the state before the first token of a model, wrapped or not; None = it is zeros."""
    inner = next(module for module in model.modules() if isinstance(module, RecurrentLM))
    return inner.zero_state if inner.config.memory_tokens else None


def _piece(arguments: dict[str, Tensor], context: ContextGroup) -> dict[str, Tensor]:
    """The arguments of this process's piece of rows ``[B, T]``; documents are told by where they lie in whole rows."""
    cut = {name: arguments[name].chunk(context.world, dim=1)[context.rank] for name in ("input_ids", "labels")}
    return arguments | {name: tensor.contiguous() for name, tensor in cut.items()}


def read_batch(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    text: Tensor,
    initial: InitialState,
    segments: Segments | None = None,
    parts: dict[str, Tensor] | None = None,
    context: ContextGroup | None = None,
    leash: LeashedBatch | None = None,
) -> Tensor:
    """Read a batch from the states that `initial` chooses and show `initial` where it ended; return the mean loss.

    Losses of the layers (the balance of experts and memories) are in it, and what a leash adds.

    Args:
        input_ids, labels: int64 ``[B, T]`` on the model's device.
        text: bool ``[B]``: the rows of running text.
        segments: the documents to keep apart; None = every row is read as one text.
        parts: gets what the loss has beside that of the labels: `auxiliary_loss` of layers, `leash_loss`.
        context: the processes that share the rows, all of which call this with the same ones; each reads its piece.
            The loss is that of the whole rows, its gradient that of this process's part. None = rows are whole.
        leash: keeps the model close to a teacher, which reads the batch from the state before any text.
    """
    count, labels = label_count(labels), labels if leash is None else leash.left(labels)
    arguments = {"input_ids": input_ids, "labels": labels} if segments is None else segments.inputs(input_ids, labels)
    if segments is None:
        before = initial.before_batch(text)
    elif initial.by_row:
        before = initial.before_batch(text)
        before = None if before is None else segments.spread(before, initial.continues, _beginning(model))
    else:
        before = initial.before_batch(text[segments.row], segments.row)
    read = arguments if context is None else _piece(arguments, context)
    with nullcontext() if context is None else context_parallel(context):
        out = model(**read, past_key_values=before, loss_only=True, output_hidden_states=leash is not None)
        pulled = None if leash is None else leash.pull(out, read, context)
    final: RecurrentState = out.past_key_values
    initial.after_batch(segments.ends(final) if segments is not None and initial.by_row else final)
    added: dict[str, Tensor] = {}
    if pulled is not None:
        added["leash_loss"] = pulled / count.clamp(min=1)
    if out.auxiliary_loss is not None:
        added["auxiliary_loss"] = out.auxiliary_loss
    if parts is not None:
        parts.update({name: part.detach() for name, part in added.items()})
    # A mean over all labels, also those that a leash has taken the place of.
    loss: Tensor = out.loss if leash is None else out.loss * (label_count(labels) / count.clamp(min=1))
    return sum(added.values(), loss)
