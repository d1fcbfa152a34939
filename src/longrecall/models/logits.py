"""The head, and what some families do to its logits: a multiplier, a soft cap."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from longrecall.layers.access import is_hooked
from longrecall.layers.projections import is_plain
from longrecall.models.long_texts import Wanted
from longrecall.models.losses import Items, next_token_loss, next_token_loss_of_hidden


class Head(nn.Linear):
    """The last linear layer, hidden states to logits, which can give the loss of labels without all logits at once."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None, items: Items = None) -> Tensor:
        """Hidden states ``[..., d]`` -> logits ``[..., vocab]``; with `labels`, their loss.

        Labels ``[B, T]`` and `items` as for `losses.next_token_loss_of_hidden`, hidden states ``[B, T, d]``.
        """
        if labels is None:
            return super().forward(hidden)
        return next_token_loss_of_hidden(hidden, self.weight, labels, items)


def loss_without_logits(head: nn.Module, hidden: Tensor, labels: Tensor, items: Items) -> Tensor | None:
    """The loss of labels ``[B, T]`` straight from hidden states ``[B, T, d]``; None where it takes the logits.

    Somebody may have put another module in the place of the head, or hooks on it which want to see logits. FSDP2's
    hooks bring the weight, and want nothing but the call: it puts a class of its own over the head's.
    """
    if isinstance(head, Head) and head.bias is None and (type(head) is not Head or not is_hooked(head)):
        loss: Tensor = head(hidden, labels, items)
        return loss
    # As transformers makes a head for another vocabulary.
    return next_token_loss_of_hidden(hidden, head.get_parameter("weight"), labels, items) if is_plain(head) else None


class LogitScale(NamedTuple):
    """cap * tanh(multiplier * logits / cap), without the cap where it is None."""

    multiplier: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` as the head makes them -> as the model returns them, in their dtype."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.soft_cap is not None:
            logits = (logits / self.soft_cap).tanh() * self.soft_cap
        return logits


def logits_and_loss(
    head: nn.Module, scale: LogitScale, hidden: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """What is wanted of hidden states ``[B, T, d]``: logits ``[B, n, vocab]`` and a loss (ValueError: no labels)."""
    labels, keep = wanted.labels, wanted.logits_to_keep
    if wanted.loss_only and labels is None:
        raise ValueError("loss_only needs labels")
    if wanted.loss_only and labels is not None and scale.soft_cap is None:
        states = hidden if scale.multiplier == 1.0 else hidden * scale.multiplier
        alone = loss_without_logits(head, states, labels, wanted.items)
        if alone is not None:
            return None, alone
    kept = slice(-keep, None) if isinstance(keep, int) else keep
    logits = scale(head(hidden[:, kept] if not isinstance(keep, int) or keep else hidden))
    loss = None if labels is None else next_token_loss(logits, labels, wanted.items)
    return (None if wanted.loss_only else logits), loss
