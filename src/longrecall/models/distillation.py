"""How far a model's predictions are from a teacher's: their divergence, formed without two whole sets of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrecall.models.logits import LogitScale

NUMBERS = 1 << 25
"""Logits of each of the two that are in memory at a time, about."""


class Predictions(NamedTuple):
    """The next tokens that a model predicts after N tokens, as what their logits are made of.

    Attributes:
        hidden: ``[N, d]``, what the head reads.
        head: hidden states -> logits; it is called, so that adapters and hooks on it count.
        scale: what the model does to its logits.
    """

    hidden: Tensor
    head: nn.Module
    scale: LogitScale

    def logits(self, hidden: Tensor) -> Tensor:
        """Some of the hidden states ``[n, d]`` -> logits ``[n, vocab]``."""
        logits: Tensor = self.scale(self.head(hidden))
        return logits


class Closeness(NamedTuple):
    """How predictions are compared.

    Attributes:
        temperature: both logits are divided by it, and the divergence is multiplied by its square, which keeps the size
            of the gradient.
        top_k: the teacher's so many likeliest tokens count one by one and all others as one; None = every token.
    """

    temperature: float = 1.0
    top_k: int | None = None


def divergence(student: Predictions, teacher: Predictions, how: Closeness, numbers: int = NUMBERS) -> Tensor:
    """KL(teacher || student) in nats, summed over N tokens, in float32 (float64 for such hidden states).

    The gradient reaches the student's hidden states and its head. It is formed in the forward pass, a few tokens at a
    time: the backward pass only multiplies it. Where both predict alike, value and gradient are exactly 0.

    Args:
        student, teacher: N predictions each, over the same vocabulary.
        how: what counts.
        numbers: logits of each that may be in memory at a time.
    """
    weights = [weight for weight in student.head.parameters() if weight.requires_grad]
    total: Tensor = _Divergence.apply(student, teacher, how, numbers, student.hidden, *weights)
    return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Predictions,
        teacher: Predictions,
        how: Closeness,
        numbers: int,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        count = len(hidden)
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=exact, device=hidden.device)
        wanted = any(ctx.needs_input_grad)
        slopes = [torch.zeros_like(hidden), *(torch.zeros_like(weight, dtype=exact) for weight in weights)]
        begin, size = 0, 1
        while begin < count:
            rows = slice(begin, begin + size)
            with torch.set_grad_enabled(wanted):
                piece = hidden[rows].detach().requires_grad_(wanted)
                logits = student.logits(piece)
            with torch.no_grad():
                aim = teacher.logits(teacher.hidden[rows])
            value, slope = compare(logits.detach().to(exact), aim.to(exact), how)
            total += value
            if wanted:
                reached = [piece, *weights]
                found = torch.autograd.grad(logits, reached, slope.to(logits.dtype), allow_unused=True)
                if found[0] is not None:
                    slopes[0][rows] = found[0]
                for total_slope, part in zip(slopes[1:], found[1:], strict=True):
                    if part is not None:
                        total_slope += part
            # The first piece, of one token, tells how many logits there are.
            begin += size
            size = max(1, numbers // logits.shape[-1])
        if wanted:
            ctx.save_for_backward(*slopes)
            ctx.dtypes = [hidden.dtype, *(weight.dtype for weight in weights)]
        return total

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (factor,) = given
        slopes = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[4:], strict=True)
        # In the factor's own type: a GPU would round it to that of narrow slopes, and change the length of all.
        found = [(slope.to(factor.dtype) * factor).to(dtype) if needed else None for slope, dtype, needed in slopes]
        return (None, None, None, None, *found)


def compare(student: Tensor, teacher: Tensor, how: Closeness) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of logits ``[n, vocab]``, summed, and its slope along the student's ``[n, vocab]``.

    With `top_k` it is that of the coarser distributions over the k tokens and all others as one outcome: it is never
    more than the whole one, and 0 where both agree on these.
    """
    heat = how.temperature
    own, aim = ((logits / heat).log_softmax(-1) for logits in (student, teacher))
    if how.top_k is None or how.top_k >= own.shape[-1]:
        share = aim.exp()
        value = (share * (aim - own)).sum()
        slope = own.exp() - share
    else:
        best = aim.topk(how.top_k, -1).indices
        rest_own, rest_aim = (x.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True) for x in (own, aim))
        best_own, best_aim = own.gather(-1, best), aim.gather(-1, best)
        value = (best_aim.exp() * (best_aim - best_own)).sum() + (rest_aim.exp() * (rest_aim - rest_own)).sum()
        # A token of the rest shares the slope of its outcome by how likely the student holds it. How many times as
        # likely the teacher's rest is may be more than a number holds; times the student's likelihood it is at most 1.
        slope = own.exp() - (own + (rest_aim - rest_own)).exp()
        slope = slope.scatter(-1, best, best_own.exp() - best_aim.exp())
    return value * heat**2, slope * heat


def relative_error(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Squared distance over squared length of the teacher's streams ``[N, d]``: mean over streams, sum over N tokens.

    In float32 (float64 for such streams); the gradient reaches the student's.
    """
    total: Tensor | None = None
    for own, aim in zip(student, teacher, strict=True):
        exact = torch.float64 if own.dtype == torch.float64 else torch.float32
        own, aim = own.to(exact), aim.detach().to(exact)
        # A stream of zeros has no direction to keep; the bound is far below any that a model makes.
        part = ((own - aim).square().sum(-1) / aim.square().sum(-1).clamp(min=1e-12)).sum()
        total = part if total is None else total + part
    if total is None:
        raise ValueError("there are no streams to compare")
    return total / len(student)
