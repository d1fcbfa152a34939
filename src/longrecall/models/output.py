"""What a forward pass of a RecurrentLM returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils.generic import ModelOutput


@dataclass
class RecurrentOutput(ModelOutput):
    """What a forward pass returns.

    Attributes:
        loss: mean cross-entropy (nats per label) when labels were given.
        logits: ``[B, T, vocab]``, or the last `logits_to_keep` positions of it.
        past_key_values: the new RecurrentState, None with ``use_cache=False``.
        hidden_states: the residual stream before every layer and after the last norm, if asked for.
        auxiliary_loss: sum of the losses that layers add in training mode (MoM's balance), already weighed; None where
            there is none. It is not a part of `loss`, except under transformers' Trainer (`num_items_in_batch`):
            longrecall's own training adds it.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    auxiliary_loss: Tensor | None = None
