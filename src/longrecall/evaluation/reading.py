"""Reading sequences with a model in segments, keeping only what the scored positions need.

Two ways to read the same tokens (in another batch, with padding, cut elsewhere) round differently. So every decision
comes with a doubt: how far rounding could move it. A decision within its doubt is too close to call; whoever needs it
reads that sequence again alone, which is the same computation whatever the batch was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.tasks.encoding import IGNORE

Ints = NDArray[np.int64]

# Shares of the largest logit. Batches, padding and segments moved the logits of the shipped base models by up to 4e-6
# (float32) and 0.02 (bfloat16) of it; float16 has three bits more than bfloat16.
_DOUBT = {torch.float64: 2.0**-40, torch.float32: 2.0**-13, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


@dataclass(frozen=True)
class Predictions:
    """What a model said at the scored positions of a batch, one entry per position, ordered by row and column.

    `row`, `column` int64: where the label stands; `right` bool: the argmax is the label; `loss` float64: nats;
    `finite` bool: the logits held neither NaN nor infinity; `margin` float64: the label's logit above the best other
    one; `doubt` float64: by how much rounding could change the margin.
    """

    row: Ints
    column: Ints
    right: NDArray[np.bool_]
    loss: NDArray[np.float64]
    finite: NDArray[np.bool_]
    margin: NDArray[np.float64]
    doubt: NDArray[np.float64]

    @property
    def close(self) -> NDArray[np.bool_]:
        """Whether rounding could change what is `right`."""
        return np.asarray(self.finite & (np.abs(self.margin) < self.doubt))


@dataclass(frozen=True)
class Continuation:
    """What a model said: `tokens` up to the end token, which is left out.

    `finite`: no logit that chose one of them was NaN or infinite. `close`: it was cut short at a token that rounding
    could change.
    """

    tokens: list[int]
    finite: bool
    close: bool


def pad_right(rows: Sequence[Ints], fill: int) -> Ints:
    """Return int64 [rows, longest]. Padding on the right needs no mask: no earlier position can see it."""
    padded = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def has_state_value(model: Any) -> bool:
    """Return whether the model's state can be used twice and by rows, and its prompts padded on the left."""
    return isinstance(model, RecurrentLM)


def doubt_share(model: Any, logits: Tensor) -> float:
    """Return the share of the largest logit by which rounding may move a logit."""
    dtype = getattr(model, "dtype", logits.dtype)
    coarse = logits.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return _DOUBT[torch.float16] if coarse and dtype == torch.float32 else _DOUBT.get(dtype, _DOUBT[torch.bfloat16])


@torch.inference_mode()
def read_predictions(
    model: Any, input_ids: Ints, labels: Ints, segment_tokens: int, state: Any = None, *, margins: bool = True
) -> Predictions:
    """Read a batch, from a state or from the beginning, and return its predictions at labelled positions.

    `input_ids`, `labels` int64 [B, T]; a label stands at its own index and is predicted one position before, so
    labels at index 0 are not scored. At most `segment_tokens` columns are read at once, with the state carried from
    segment to segment, so memory does not grow with T (for recurrent layers; attention keeps its keys). Without
    `margins` these and their doubts are NaN, which saves time where every position is scored.
    """
    row, column = np.nonzero(labels[:, 1:] != IGNORE)
    numbers = np.full((4, len(row)), np.nan)  # loss, margin, doubt, finite
    right = np.zeros(len(row), dtype=np.bool_)
    ids = torch.from_numpy(input_ids)
    targets = torch.from_numpy(labels[:, 1:])
    # Nothing after the last position that predicts a label needs reading.
    stop = int(column.max()) + 1 if len(column) else 0
    for start in range(0, stop, segment_tokens):
        end = min(start + segment_tokens, stop)
        here = np.flatnonzero((column >= start) & (column < end))
        kept = np.unique(column[here]) - start if len(here) else np.array([end - start - 1])
        logits, state = _forward(model, ids[:, start:end].to(model.device), state, kept, last=end == stop)
        if len(here):
            place = torch.from_numpy(np.searchsorted(kept, column[here] - start)).to(model.device)
            scored = logits[torch.from_numpy(row[here]).to(model.device), place]
            target = targets[row[here], column[here]].to(model.device)
            right[here], numbers[:, here] = _judge(
                scored.float(), target, doubt_share(model, scored) if margins else None
            )
    loss, margin, doubt, finite = numbers
    finite = finite == 1.0
    return Predictions(row, column + 1, right & finite, loss, finite, margin, doubt)


def _judge(logits: Tensor, target: Tensor, share: float | None) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return argmax == target, and loss, margin, doubt and finiteness as float64 [4, n], of logits [n, vocab]."""
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    right = logits.argmax(-1) == target
    margin = doubt = torch.full_like(loss, float("nan"))
    if share is not None:
        best, where = logits.topk(min(2, logits.shape[1]), dim=-1)
        own = logits.gather(-1, target[:, None])[:, 0]
        margin = own - torch.where(where[:, 0] == target, best[:, -1], best[:, 0])
        doubt = share * logits.abs().amax(-1)
    finite = torch.isfinite(logits).all(-1)
    numbers = torch.stack([part.double() for part in (loss, margin, doubt, finite)])
    return right.cpu().numpy(), numbers.cpu().numpy()


@torch.inference_mode()
def read_prompts(model: Any, prompts: Sequence[Ints], segment_tokens: int, state: Any = None) -> tuple[Tensor, Any]:
    """Read prompts, each to its end, from a state of as many rows; return (logits [B, 1, vocab], state) after them.

    Shorter ones are padded on the left, which takes a model with `has_state_value`; ValueError for any other.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=np.bool_)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = True
    padded = int((~mask).any(0).sum())
    if padded and not has_state_value(model):
        raise ValueError("prompts of unequal lengths need a model that takes padding on the left")
    logits: Tensor | None = None
    for start in range(0, longest, segment_tokens):
        part = torch.from_numpy(ids[:, start : start + segment_tokens]).to(model.device)
        real = torch.from_numpy(mask[:, start : start + segment_tokens]).to(model.device) if start < padded else None
        logits, state = _forward(model, part, state, np.array([part.shape[1] - 1]), last=False, mask=real)
    if logits is None:
        raise ValueError("a prompt needs at least one token")
    return logits, state


@torch.inference_mode()
def read_continuations(
    model: Any,
    prompts: Sequence[Ints],
    new_tokens: int,
    segment_tokens: int,
    ended: Callable[[int, list[int]], bool],
    *,
    state: Any = None,
    end_token: int | None = None,
    decide: bool = True,
) -> list[Continuation]:
    """Read prompts (as `read_prompts` does) and go on greedily, each row until it ends or has `new_tokens` tokens.

    `ended` is asked after every token with the row and its tokens so far. `decide`: choose even where it is close;
    otherwise the row stops there, marked `close`. Rows that have stopped are not read any further.
    """
    logits, state = read_prompts(model, prompts, segment_tokens, state)
    said: list[list[int]] = [[] for _ in prompts]
    finite, close = [True] * len(prompts), [False] * len(prompts)
    rows = list(range(len(prompts)))
    going = set(rows)
    while True:
        newest = logits[:, -1].float()
        chosen = newest.argmax(-1)
        good = torch.isfinite(newest).all(-1).tolist()
        near = [False] * len(rows) if decide else _near(newest, doubt_share(model, logits)).tolist()
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            if row not in going:
                continue
            finite[row] = finite[row] and good[place]
            close[row] = good[place] and near[place]
            if close[row] or token == end_token:
                going.discard(row)
                continue
            said[row].append(token)
            if len(said[row]) == new_tokens or ended(row, said[row]):
                going.discard(row)
        if not going:
            return [Continuation(*parts) for parts in zip(said, finite, close, strict=True)]
        if len(going) < len(rows) and has_state_value(model):
            kept = torch.tensor([place for place, row in enumerate(rows) if row in going], device=chosen.device)
            state, chosen = state.select_rows(kept), chosen[kept]
            rows = [row for row in rows if row in going]
        logits, state = _forward(model, chosen[:, None], state, np.array([0]), last=False)


def _near(logits: Tensor, share: float) -> Tensor:
    """Return bool [B]: the two best of logits [B, vocab] are within their doubt."""
    best = logits.topk(min(2, logits.shape[1]), dim=-1).values
    return best[:, 0] - best[:, -1] < share * logits.abs().amax(-1)


def _forward(
    model: Any, ids: Tensor, state: Any, kept: Ints, last: bool, mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Return logits [B, kept, vocab] and the state after `ids` (None after the last segment)."""
    columns = torch.from_numpy(kept).to(ids.device)
    arguments: dict[str, Any] = {"past_key_values": state, "use_cache": not last}
    if mask is not None:
        arguments["attention_mask"] = mask
    # The head over a large vocabulary costs more than the layers; ask for the scored columns where the model can.
    narrow = len(kept) < ids.shape[1] and "logits_to_keep" in inspect.signature(model.forward).parameters
    if narrow:
        arguments["logits_to_keep"] = columns
    output = model(ids, **arguments)
    logits = output.logits if narrow else output.logits[:, columns]
    return logits, None if last else output.past_key_values
