"""Cross-entropy of a linear head: the logits of a loss are formed, used and dropped a piece of the tokens at a time.

The definition in torch forms the logits of all labelled tokens. The kernel path (triton/) goes through the tokens in
pieces: a product gives their logits, one kernel the losses and, in the place of the logits, their gradients, and two
more products those of the states and of the weight. Nothing waits for the GPU, so that a step can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, Presumed, declare, kernel

IGNORED = -100
"""The label of a token that has no loss."""

PIECE_BYTES = 256 << 20
"""Of the logits of a piece: large enough that its products fill a GPU."""

FEWEST_TOKENS = 128
"""Of a piece, however large the vocabulary."""

LINEAR_CROSS_ENTROPY = declare(Op("linear_cross_entropy", kernels="cross_entropy.triton.pieces", compiler_fuses=True))


def _of_head(states: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> Presumed:
    return ("weight", weight, weight.shape[0] * states.shape[1]), ("labels", labels, len(states))


_in_pieces = kernel("cross_entropy.triton.pieces", "linear_cross_entropy", presumes=_of_head)


def linear_cross_entropy(
    states: Tensor, weight: Tensor, labels: Tensor, *, dtype: torch.dtype | None = None, backend: str | None = None
) -> Tensor:
    """Return the sum of the cross-entropies of `labels` given the logits ``states @ weight.T``, float32 ``[]``.

    Logits and their gradients have `dtype`; sums over the vocabulary and over tokens are float32. float64 stays
    float64. On a GPU a label outside of the vocabulary gives NaN.

    Args:
        states: ``[N, d]``.
        weight: ``[vocab, d]``. Its gradient is added up in float32 and has its dtype.
        labels: int64 ``[N]``; -100 = no loss.
        dtype: in which the products are computed; None = that of `states`.
        backend: "triton" or "reference"; None chooses.

    Raises:
        ValueError: there is not one label for each state; the kernel was asked for by name and cannot serve the call.
    """
    if len(labels) != len(states):
        raise ValueError(f"there are {len(labels)} labels for {len(states)} states; give each state one, -100 for none")
    dtype = dtype or states.dtype
    # Of no tokens there is no piece.
    if LINEAR_CROSS_ENTROPY.on_kernels({"states": states, "weight": weight}, backend) and len(states):
        total: Tensor = _in_pieces(states, weight, labels, dtype)
        return total
    kept = labels != IGNORED
    logits = F.linear(states[kept].to(dtype), weight.to(dtype))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels[kept], reduction="sum")


def piece_tokens(tokens: int, vocabulary: int, width: int) -> int:
    """How many of `tokens` tokens are read at a time, of `width` bytes a logit: a power of two, or all of them."""
    most = max(FEWEST_TOKENS, PIECE_BYTES // (vocabulary * width))
    return min(tokens, 1 << (most.bit_length() - 1))


def gradient_scale(dtype: torch.dtype) -> float:
    """What gradients of logits, 1 at most, are multiplied by while they are of this type.

    The loss of training in float16 is scaled, but these are made before. Most tokens are unlikely, and below 6e-8
    float16 has no numbers. The gradient of a state is at most twice the largest weight, which may come to 127 so.
    """
    return 256.0 if dtype == torch.float16 else 1.0
