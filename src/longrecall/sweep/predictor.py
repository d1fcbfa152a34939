"""A model with its task's way of answering: logits at the labelled positions only.

With a vocabulary of 8192, logits at every position of a batch would take gigabytes, and a recall task asks for few of
them: the hidden states of the labelled positions are gathered before the head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import unread_states
from longrecall.tasks.sequences import Readout

IGNORE = -100
DECODER_WIDTH = 4
"""Inner width of the decoder as a multiple of the hidden size."""


class EmbeddingDropout(nn.Module):
    """Dropout with a generator of its own; registered behind the token embedding."""

    def __init__(self, share: float, generator: torch.Generator) -> None:
        super().__init__()
        self.share, self.generator = share, generator

    def forward(self, x: Tensor) -> Tensor:
        """Zero each number of x with probability `share` in training and scale the others up to keep the mean."""
        if not self.training or not self.share:
            return x
        kept = torch.rand(x.shape, generator=self.generator, device=x.device) >= self.share
        return x * kept / (1 - self.share)


class LastStateDecoder(nn.Module):
    """MAD's compression decoder: Linear, GELU, Linear on the encoder's last state plus a sinusoidal position.

    Source: Poli et al. 2024 (MAD), compression task; positions as in Vaswani et al. 2017, section 3.5. The inner width
    is ours (`DECODER_WIDTH` times the hidden size). It has no memory but the state: every token that it writes has gone
    through that one vector.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, DECODER_WIDTH * hidden_size)
        self.down = nn.Linear(DECODER_WIDTH * hidden_size, vocab_size)

    def forward(self, state: Tensor, positions: Tensor) -> Tensor:
        """Last state ``[B, d]`` and positions int64 ``[B, M]`` -> logits ``[B, M, V]``."""
        x = state.unsqueeze(1) + sinusoids(positions, state.shape[-1]).to(state.dtype)
        logits: Tensor = self.down(F.gelu(self.up(x)))
        return logits


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Return float32 ``[..., size]``: sines in the first half, cosines of the same angles in the other."""
    half = (size + 1) // 2
    rates = torch.exp(torch.arange(half, device=positions.device) * (-math.log(10000.0) / max(1, half)))
    angles = positions.unsqueeze(-1).float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[..., :size]


def decoder_parameters(hidden_size: int, vocab_size: int) -> int:
    """Return how many parameters a `LastStateDecoder` has."""
    inner = DECODER_WIDTH * hidden_size
    return inner * (hidden_size + 1) + vocab_size * (inner + 1)


class Predictor(nn.Module):
    """A language model, with a decoder where the task's readout is the last state.

    `generator` (of the model's device) draws the embedding dropout.
    """

    def __init__(
        self, model: RecurrentLM, readout: Readout, dropout: float = 0.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.decoder = LastStateDecoder(config.hidden_size, config.vocab_size) if readout == "last_state" else None
        if dropout:
            # A hook, and not embeddings handed in: layers that read the tokens themselves see the same numbers.
            self.dropout = EmbeddingDropout(dropout, generator or torch.Generator(model.device).manual_seed(0))
            model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: self.dropout(output))

    def forward(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens int64 ``[B, T]``, positions int64 ``[B, M]`` -> logits ``[B, M, V]`` of the answers there.

        The second value is the loss that the model's layers add to the task's (a scalar), None where they add none.
        """
        # Past the model's own forward: that would run the head first, or make each layer's sum apart from its norm.
        inner = self.model.model
        with unread_states():
            hidden, _, _, losses = inner(inner.get_input_embeddings()(ids), None, None, ids=ids)
        added = torch.stack(losses).sum() if losses else None
        if self.decoder is not None:
            return self.decoder(hidden[:, -1], positions), added
        index = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return self.model.lm_head(hidden.gather(1, index)), added


def label_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32, nats per label: ``[B, M, V]`` against int64 ``[B, M]``, -100 ignored.

    No label at all gives 0, not NaN.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)
