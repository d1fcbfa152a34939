"""The weights of a retrieval layer, and the vectors that its encoders make."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

START_TEMPERATURE = 4.0
"""Logits of a chunk at cosine 1 before training."""


class RetrievalSizes(Protocol):
    """The sizes of a layer that its weights depend on; `RetrievalConfig` says what each is."""

    @property
    def chunk(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def candidates(self) -> int: ...

    @property
    def selector(self) -> str: ...

    @property
    def encoder_dim(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def alpha(self) -> float: ...

    @property
    def blend(self) -> str: ...

    def output_size(self, hidden_size: int) -> int: ...


class Encoder(nn.Module):
    """x ``[..., d]`` -> the vector of norm 1 ``[..., E]`` along W x.

    W starts as an isometry (as a projection, for E < d), or as a copy of the encoder `like`: scores begin as cosines of
    embeddings.
    """

    def __init__(self, hidden_size: int, width: int, like: Encoder | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden_size))
        # In a tuple it is no part of this module.
        self.partner = () if like is None else (like,)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W, or copy it from an encoder that was reset before."""
        if self.partner:
            self.weight.copy_(self.partner[0].weight)
        elif not self.weight.is_meta:
            # The decomposition behind it knows no 16-bit numbers.
            self.weight.copy_(nn.init.orthogonal_(torch.empty(self.weight.shape, device=self.weight.device)))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(F.linear(x, self.weight), dim=-1)


class Blend(nn.Module):
    """The mixer's share alpha: `bias` ``[d]``, with `weight` ``[d, d]`` plus a linear function of the input."""

    weight: nn.Parameter | None

    def __init__(self, hidden_size: int, alpha: float, by_input: bool) -> None:
        super().__init__()
        self.start = alpha
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size)) if by_input else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """`alpha` for every input."""
        nn.init.constant_(self.bias, self.start)
        if self.weight is not None:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor, y: Tensor, found: Tensor) -> Tensor:
        """alpha * y + (1 - alpha) * found for the layer's input x, all ``[B, T, d]``; alpha is not limited to 0..1."""
        return blended(self.bias if self.weight is None else F.linear(x, self.weight, self.bias), y, found)


def blended(alpha: Tensor | float, y: Tensor, found: Tensor) -> Tensor:
    """alpha * y + (1 - alpha) * found: what a mixer gave and what retrieval found, ``[B, T, d]``."""
    return alpha * y + (1 - alpha) * found


class RetrievalWeights(nn.Module):
    """A retrieval layer's mixer `base`, the encoders of chunks and queries, the attention's projections, the blend."""

    def __init__(self, config: RetrievalSizes, hidden_size: int, base: nn.Module | None) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
        self.base = base
        self.chunk_encoder = Encoder(hidden_size, config.encoder_dim)
        self.query_encoder = Encoder(hidden_size, config.encoder_dim, like=self.chunk_encoder)
        self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.output_size(hidden_size), bias=False)
        self.blend = None if config.blend == "fixed" else Blend(hidden_size, config.alpha, config.blend == "input")
        self.temperature = nn.Parameter(torch.empty(1)) if config.selector == "weighted" else None
        # What only selects gets no gradient; data parallelism must not wait for one.
        for encoder in (self.chunk_encoder, self.query_encoder):
            encoder.requires_grad_(config.selector == "weighted")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The starting temperature; the parts reset themselves."""
        if self.temperature is not None:
            nn.init.constant_(self.temperature, math.log(START_TEMPERATURE))

    def encode_chunks(self, embedded: Tensor) -> Tensor:
        """Chunk vectors ``[..., E]`` of norm 1 from the scaled embeddings ``[..., U, d]`` of their tokens."""
        vectors: Tensor = self.chunk_encoder(embedded.mean(-2))
        return vectors

    def encode_queries(self, x: Tensor) -> Tensor:
        """Query vectors ``[..., E]`` of norm 1 from the layer's normed input ``[..., d]``."""
        vectors: Tensor = self.query_encoder(x)
        return vectors
