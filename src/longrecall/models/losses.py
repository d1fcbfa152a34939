"""Cross-entropy of the next token: from logits, or straight from hidden states without keeping the logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.borders import sum_of_pieces
from longrecall.ops.cross_entropy.op import IGNORED, linear_cross_entropy

Items = Tensor | int | None
"""What a sum of cross-entropies is divided by; None = how many labels it has."""


def label_count(labels: Tensor) -> Tensor:
    """How many positions of labels ``[B, T]`` have a loss (int64): the first of a row is predicted by nothing.

    In a piece of a sequence it is the number in all pieces.
    """
    return sum_of_pieces((labels[:, 1:] != -100).sum())


def predicted_labels(labels: Tensor, mask: Tensor, items: Items) -> tuple[Tensor, Items]:
    """Labels ``[B, T]`` that a token predicts, and the number to divide their sum by (as for `next_token_loss`).

    Those behind padding (bool mask ``[B, T]`` False), such as a text's first token where padding is on the left, become
    -100. Whoever counted `items` counted them too: the number shrinks by the share of this batch's labels that goes, so
    that the loss keeps its scale.
    """
    kept = torch.cat([labels[:, :1], labels[:, 1:].masked_fill(~mask[:, : labels.shape[1] - 1], -100)], dim=1)
    if items is None:
        return kept, None
    counted, given = label_count(kept), label_count(labels)
    # A batch that loses all its labels has loss 0, whatever it is divided by.
    return kept, torch.where(counted > 0, items * counted / given.clamp(min=1), 1)


def next_token_loss(logits: Tensor, labels: Tensor, items: Items = None) -> Tensor:
    """Mean cross-entropy in float32 of labels ``[B, T]`` (-100 = ignored) given the logits one position before each.

    A batch without any label has loss 0, not NaN. `items`: labels of a larger batch, of which these are a part; then
    the sum is divided by it, and the losses of all parts add up to the mean.

    In a piece of a sequence there is a label more than there are logits, which the last logits predict
    (`pieces.with_next_label`). The loss is then that of all pieces, on every rank. Its gradient is that of this
    rank's part: gradients of parameters, added up over the ranks, are those of the whole sequence.
    """
    targets = labels[:, 1:].flatten()
    predictions = logits[:, : labels.shape[1] - 1].flatten(0, 1)
    predictions = predictions if predictions.dtype == torch.float64 else predictions.float()
    total = F.cross_entropy(predictions, targets, ignore_index=-100, reduction="sum")
    return mean_loss(total, labels, items)


def next_token_loss_of_hidden(hidden: Tensor, weight: Tensor, labels: Tensor, items: Items = None) -> Tensor:
    """The same from hidden states ``[B, T, d]`` and the head's weight ``[vocab, d]``; logits are never all in memory.

    On a GPU a kernel works through the tokens in pieces (`ops.cross_entropy`). Elsewhere the logits of labelled
    positions alone are formed.
    """
    targets, missing = labels[:, 1:], hidden.shape[1] + 1 - labels.shape[1]
    if missing > 0:
        # Nothing is predicted by the last token; rows of equal length need no copy of the hidden states.
        targets = F.pad(targets, (0, missing), value=IGNORED)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    dtype = hidden.dtype if hidden.dtype == torch.float64 else dtype
    total = linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), dtype=dtype)
    return mean_loss(total, labels, items)


def mean_loss(total: Tensor, labels: Tensor, items: Items = None) -> Tensor:
    """The sum of the cross-entropies of labels ``[B, T]``, divided by their number, or by `items`."""
    total = sum_of_pieces(total)
    if items is None:
        return total / label_count(labels).clamp(min=1)
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)
