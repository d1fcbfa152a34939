"""Cross-entropy of the next token: from logits, or straight from hidden states without keeping the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in float32 of labels ``[B, T]`` (-100 = ignored) given the logits one position before each.

    A batch without any label has loss 0, not NaN.
    """
    targets = labels[:, 1:].flatten()
    predictions = logits[:, :-1].flatten(0, 1)
    predictions = predictions if predictions.dtype == torch.float64 else predictions.float()
    total = F.cross_entropy(predictions, targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)


def next_token_loss_of_hidden(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same from hidden states ``[B, T, d]`` and the head's weight ``[vocab, d]``; logits are never all in memory.

    On a GPU with Liger-Kernel installed (extra `gpu`) its fused kernel works through the tokens in chunks. Elsewhere
    the logits of labelled positions alone are formed.
    """
    targets, states = labels[:, 1:].flatten(), hidden[:, :-1].flatten(0, 1)
    count = (targets != -100).sum().clamp(min=1)
    fused = _fused() if hidden.is_cuda and hidden.dtype != torch.float64 else None
    if fused is not None:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            states, weight = states.to(dtype), weight.to(dtype)
        total: Tensor = fused(states, weight, targets, reduction="sum", accum_dtype=torch.float32)
        return total / count
    kept = targets != -100
    predictions = F.linear(states[kept], weight)
    predictions = predictions if predictions.dtype == torch.float64 else predictions.float()
    return F.cross_entropy(predictions, targets[kept], reduction="sum") / count


def _fused() -> Any:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return None
    return liger_fused_linear_cross_entropy
