"""Reading sequences with a model in segments, keeping only what the scored positions need."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrecall.tasks.encoding import IGNORE


@dataclass(frozen=True)
class Predictions:
    """What a model said at the scored positions of a batch, one entry per position, ordered by row and column.

    `row`, `column` int64: where the label stands; `right` bool: the argmax is the label; `loss` float64: nats;
    `finite` bool: the logits held neither NaN nor infinity.
    """

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    right: NDArray[np.bool_]
    loss: NDArray[np.float64]
    finite: NDArray[np.bool_]


def pad_right(rows: list[NDArray[np.int64]], fill: int) -> NDArray[np.int64]:
    """Return int64 [rows, longest]. Padding on the right needs no mask: no earlier position can see it."""
    padded = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


@torch.inference_mode()
def read_predictions(
    model: Any, input_ids: NDArray[np.int64], labels: NDArray[np.int64], segment_tokens: int
) -> Predictions:
    """Read a batch and return its predictions at labelled positions.

    `input_ids`, `labels` int64 [B, T]; a label stands at its own index and is predicted one position before, so
    labels at index 0 are not scored. At most `segment_tokens` columns are read at once, with the state carried from
    segment to segment, so memory does not grow with T (for recurrent layers; attention keeps its keys).
    """
    row, column = np.nonzero(labels[:, 1:] != IGNORE)
    right = np.zeros(len(row), dtype=np.bool_)
    loss = np.full(len(row), np.nan)
    finite = np.zeros(len(row), dtype=np.bool_)
    ids = torch.from_numpy(input_ids)
    targets = torch.from_numpy(labels[:, 1:])
    # Nothing after the last position that predicts a label needs reading.
    stop = int(column.max()) + 1 if len(column) else 0
    state: Any = None
    for start in range(0, stop, segment_tokens):
        end = min(start + segment_tokens, stop)
        here = np.flatnonzero((column >= start) & (column < end))
        kept = np.unique(column[here]) - start if len(here) else np.array([end - start - 1])
        output = _forward(model, ids[:, start:end].to(model.device), state, kept, last=end == stop)
        state = output[1]
        if len(here):
            place = torch.from_numpy(np.searchsorted(kept, column[here] - start)).to(model.device)
            logits = output[0][torch.from_numpy(row[here]).to(model.device), place].float()
            target = targets[row[here], column[here]].to(model.device)
            right[here] = (logits.argmax(-1) == target).cpu().numpy()
            loss[here] = torch.nn.functional.cross_entropy(logits, target, reduction="none").double().cpu().numpy()
            finite[here] = torch.isfinite(logits).all(-1).cpu().numpy()
    return Predictions(row, column + 1, right & finite, loss, finite)


@torch.inference_mode()
def read_continuation(
    model: Any,
    input_ids: NDArray[np.int64],
    new_tokens: int,
    segment_tokens: int,
    ended: Callable[[NDArray[np.int64]], bool],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read prompts and go on greedily; return (tokens int64 [B, at most `new_tokens`], finite bool [B]).

    `input_ids` int64 [B, T], all of one length, so nothing is padded. Prompts are read as in `read_predictions`.
    `ended` is asked after every token with the tokens so far, [B, so far]; generation stops when it says so. A row is
    not `finite` when a logit that chose one of its tokens was NaN or infinite.
    """
    ids = torch.from_numpy(input_ids)
    state: Any = None
    logits: Tensor | None = None
    for start in range(0, ids.shape[1], segment_tokens):
        part = ids[:, start : start + segment_tokens].to(model.device)
        logits, state = _forward(model, part, state, np.array([part.shape[1] - 1]), last=False)
    finite = np.ones(len(input_ids), dtype=np.bool_)
    said = np.zeros((len(input_ids), 0), dtype=np.int64)
    while logits is not None:
        newest = logits[:, -1].float()
        finite &= torch.isfinite(newest).all(-1).cpu().numpy()
        chosen = newest.argmax(-1, keepdim=True)
        said = np.concatenate((said, chosen.cpu().numpy()), axis=1)
        if said.shape[1] == new_tokens or ended(said):
            break
        logits, state = _forward(model, chosen, state, np.array([0]), last=False)
    return said, finite


def _forward(model: Any, ids: Tensor, state: Any, kept: NDArray[np.int64], last: bool) -> tuple[Tensor, Any]:
    """Return logits [B, kept, vocab] and the state after `ids` (None after the last segment)."""
    columns = torch.from_numpy(kept).to(ids.device)
    arguments: dict[str, Any] = {"past_key_values": state, "use_cache": not last}
    # The head over a large vocabulary costs more than the layers; ask for the scored columns where the model can.
    narrow = len(kept) < ids.shape[1] and "logits_to_keep" in inspect.signature(model.forward).parameters
    if narrow:
        arguments["logits_to_keep"] = columns
    output = model(ids, **arguments)
    logits = output.logits if narrow else output.logits[:, columns]
    return logits, None if last else output.past_key_values
