"""Retrieval inside a layer (RESONA): every token attends to the few chunks of the context that resemble it most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.errors import UserError
from longrecall.layers import retrieval_reading
from longrecall.layers.mixers.base import LayerState, MixerConfig, StateShapes, state_under
from longrecall.layers.tokens import TokenContext
from longrecall.ops.retrieval.op import best_chunks, selected_attention

SELECTORS = ("weighted", "hard")
BLENDS = ("fixed", "learned", "input")

TOKEN_BLOCK = 4096
"""Earlier tokens embedded at once; only their keys and values are kept."""

RUNNERS_UP = 4
"""Chunks that are scored against the chosen ones and not read."""

START_TEMPERATURE = 4.0
"""Logits of a chunk at cosine 1 before training."""


@dataclass(frozen=True)
class RetrievalConfig(MixerConfig):
    """A mixer and, beside it, cross-attention to chosen chunks of the token embeddings."""

    type: ClassVar[str] = "retrieval"
    nested: ClassVar[tuple[str, ...]] = ("base",)

    base: MixerConfig
    chunk: int = 64
    """U, tokens of a chunk."""
    top_k: int = 4
    """k, chunks that a token reads; all of them where there are fewer."""
    selector: str = "weighted"
    """`weighted`: a chunk's score is a logit of its tokens too, so that the encoders learn; `hard` (the paper's): it
    only selects, and the encoders stay as they are."""
    encoder_dim: int = 64
    """E, width of the chunk vectors."""
    num_heads: int = 8
    head_dim: int = 64
    kv_heads: int = 1
    """Key-value heads, a divisor of num_heads; num_heads is the paper's multi-head attention."""
    alpha: float = 0.5
    """Share of the mixer in the output, with `learned` and `input` before training."""
    blend: str = "fixed"
    """`fixed`: alpha everywhere; `learned`: one number a channel; `input`: a linear function of the input a channel."""

    def __post_init__(self) -> None:
        self._require_positive("chunk", "top_k", "encoder_dim", "num_heads", "head_dim", "kv_heads")
        self._require_multiple("num_heads", "kv_heads")
        for name, choices in (("selector", SELECTORS), ("blend", BLENDS)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f'mixer "retrieval": {name} must be one of {", ".join(choices)}, got {getattr(self, name)!r}'
                )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise UserError(f'mixer "retrieval": alpha must be a number from 0 to 1, got {self.alpha!r}')
        if not isinstance(self.base, MixerConfig):
            raise UserError(f'mixer "retrieval": base must be a mixer description, got {self.base!r}')
        if self.base.reads_tokens:
            raise UserError(
                'mixer "retrieval": base has a retrieval layer already; one layer retrieves once (raise its top_k)'
            )

    @property
    def reads_tokens(self) -> bool:
        return True

    @property
    def candidates(self) -> int:
        """Chunks that a token scores: those it reads and, with `weighted`, some runners-up."""
        return self.top_k + (RUNNERS_UP if self.selector == "weighted" else 0)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"base": self.base.to_dict()}

    def state_shapes(self) -> StateShapes:
        base = {f"base.{name}": shape for name, shape in self.base.state_shapes().items()}
        return base | {"chunk": (0, self.encoder_dim)}

    def build(self, hidden_size: int) -> Retrieval:
        return Retrieval(self, hidden_size)


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

    def forward(self, x: Tensor) -> Tensor:
        """x ``[B, T, d]`` -> alpha, ``[d]`` or ``[B, T, d]``; not limited to 0..1."""
        return self.bias if self.weight is None else F.linear(x, self.weight, self.bias)


class Selection(NamedTuple):
    """What a token reads: `chunks` ``[B, T, C]`` (-1 = none); with `weighted` their logits and their joint share."""

    chunks: Tensor
    weights: Tensor | None
    share: Tensor | None


class Retrieval(nn.Module):
    r"""y = alpha * mixer(x) + (1 - alpha) * attention to the top-k chunks that end before the token.

    Source: RESONA, section 3.1, algorithms 1 to 3. Chunks are U tokens each from the beginning of the row on. A chunk's
    vector is the mean of its encoded embeddings, scaled to norm 1: the mean keeps every token's share whatever their
    order, and of a linear encoder it is the encoding of the mean, so a chunk costs one product; the norm makes the
    product with a query of norm 1 their cosine. Queries come from the layer's input, keys and values from the token
    embeddings. Where no chunk has ended yet the output is the mixer's.

    With `weighted` the logits of a chunk's tokens are raised by w = ``exp(temperature) * cosine``, and a null chunk of
    U tokens with logit 0 and value 0 competes with them. What was read is then multiplied by the chosen chunks' share
    among the candidates, the sum of e^w over the k chosen by that over them and `RUNNERS_UP` more. Within the softmax
    the score of a single chosen chunk would cancel (k = 1) or drown in large logits of its tokens; through the share
    the encoders always learn that they chose badly, and which chunks stood next.

    Its state is the mixer's, prefixed ``base.``, and `chunk` ``[B, chunks, E]``; token ids are kept once for the model.
    """

    def __init__(self, config: RetrievalConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
        self.base = config.base.build(hidden_size)
        self.chunk_encoder = Encoder(hidden_size, config.encoder_dim)
        self.query_encoder = Encoder(hidden_size, config.encoder_dim, like=self.chunk_encoder)
        self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden_size, bias=False)
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

    def forward(
        self, x: Tensor, state: LayerState | None, *, mask: Tensor | None, position: Tensor, context: TokenContext
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state; `context` ends with the tokens of x."""
        y, after = self.base(x, state_under(state, "base"), mask=mask, position=position)
        y, vectors = self.retrieve(x, y, None if state is None else state["chunk"], context, mask)
        return y, {f"base.{name}": tensor for name, tensor in after.items()} | {"chunk": vectors}

    def retrieve(
        self, x: Tensor, y: Tensor, earlier: Tensor | None, context: TokenContext, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x and the mixer's output y ``[B, T, d]``, earlier chunk vectors -> the layer's output, all chunk vectors.

        Where the context keeps its width (decoding in place) so do the vectors, and nothing waits for the GPU. Where it
        has a room the vectors are in there, and what is returned are the earlier ones.
        """
        if context.room is not None:
            assert earlier is not None
            return self._retrieve_in_room(x, y, context, mask), earlier
        vectors = self._chunk_vectors(earlier, context, x.shape[1], padded=mask is not None)
        if not vectors.shape[1]:
            return y, vectors
        if retrieval_reading.declines(self, x, context, mask) is None:
            return retrieval_reading.read(self, x, y, vectors, context), vectors
        finished = context.finished(self.config.chunk, x.shape[1], mask)
        chosen = self._select(x, vectors, finished, context.earlier)
        keys, values, local = self._keys_and_values(context, chosen.chunks)
        found = self._attend(x, keys, values, chosen._replace(chunks=local))
        return self._blended(x, y, found, finished > 0), vectors

    def _retrieve_in_room(self, x: Tensor, y: Tensor, context: TokenContext, mask: Tensor | None) -> Tensor:
        room = context.room
        assert room is not None and context.embedded is not None
        kept = room.keep(self, context.embedded)
        if retrieval_reading.declines(self, x, context, mask) is None:
            return retrieval_reading.read(self, x, y, kept.vectors, context, kept)
        finished = room.positions // self.config.chunk
        chosen = self._select(x, kept.vectors, finished, room.room)
        return self._blended(x, y, self._attend(x, kept.keys, kept.values, chosen), finished > 0)

    def _attend(self, x: Tensor, keys: Tensor, values: Tensor, chosen: Selection) -> Tensor:
        """What every token reads of the chosen chunks of keys and values ``[B, S, G, P]``: ``[B, T, d]``."""
        q = self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        found = selected_attention(q, keys, values, chosen.chunks, chosen.weights, self.config.chunk).flatten(-2)
        if chosen.share is not None:
            found = found * chosen.share[..., None]
        projected: Tensor = self.o_proj(found.to(x.dtype))
        return projected

    def _blended(self, x: Tensor, y: Tensor, found: Tensor, any_chunk: Tensor) -> Tensor:
        alpha = self.config.alpha if self.blend is None else self.blend(x)
        return torch.where(any_chunk[..., None], alpha * y + (1 - alpha) * found, y)

    def encode_chunks(self, embedded: Tensor) -> Tensor:
        """Chunk vectors ``[..., E]`` of norm 1 from the scaled embeddings ``[..., U, d]`` of their tokens."""
        vectors: Tensor = self.chunk_encoder(embedded.mean(-2))
        return vectors

    def encode_queries(self, x: Tensor) -> Tensor:
        """Query vectors ``[..., E]`` of norm 1 from the layer's normed input ``[..., d]``."""
        vectors: Tensor = self.query_encoder(x)
        return vectors

    def _chunk_vectors(self, earlier: Tensor | None, context: TokenContext, length: int, padded: bool) -> Tensor:
        """Vectors ``[B, N, E]`` of every finished chunk, zeros where a row has fewer; `length`: T of the segment."""
        size, (batch, columns) = self.config.chunk, context.ids.shape
        count = columns // size
        if earlier is not None and earlier.shape[1] > context.earlier // size:
            raise ValueError(
                f"the state has {earlier.shape[1]} chunks of {size} tokens, but a context of {context.earlier} tokens"
            )
        if context.embedded is not None:
            whole = context.embedded[:, : count * size].unflatten(1, (count, size))
            if not padded:
                return self.encode_chunks(whole)
            ended = torch.arange(count, device=whole.device) < ((context.ids >= 0).sum(1) // size)[:, None]
            return self.encode_chunks(whole).masked_fill(~ended[..., None], 0.0)
        first, last = context.before // size, (context.ids >= 0).sum(1) // size
        # From any fill of the chunk begun, T tokens end so many.
        most = (size - 1 + length) // size
        index = first[:, None] + torch.arange(most, device=first.device)
        columns_of = (index[..., None] * size + torch.arange(size, device=first.device)).clamp(max=columns - 1)
        ids = context.ids.gather(1, columns_of.flatten(1)).view(columns_of.shape)
        vectors = self.encode_chunks(context.embed(ids))
        old = vectors.new_zeros(batch, 0, vectors.shape[-1]) if earlier is None else earlier.to(vectors.dtype)
        room = vectors.new_zeros(batch, count + 1 - old.shape[1], vectors.shape[-1])
        target = torch.where(index < last[:, None], index, count)
        return torch.cat([old, room], 1).scatter(1, target[..., None].expand_as(vectors), vectors)[:, :count]

    def _select(self, x: Tensor, vectors: Tensor, finished: Tensor, earlier: int) -> Selection:
        """What every token reads, and how much of it."""
        queries, config = self.encode_queries(x), self.config
        reach = (earlier, config.chunk)
        if self.temperature is None:
            # Frozen encoders; x still asks for a gradient, which a choice does not have.
            found = best_chunks(queries.detach(), vectors.detach(), finished, config.top_k, reach=reach)
            return Selection(found[0], None, None)
        chunks, scores = best_chunks(queries, vectors, finished, config.candidates, reach=reach)
        logits = scores * self.temperature.to(scores.dtype).exp()
        masked = logits.masked_fill(chunks < 0, -torch.inf)
        best = masked.detach().topk(min(config.top_k, chunks.shape[-1]), dim=-1).indices
        chosen, weights = chunks.gather(-1, best), logits.gather(-1, best)
        # Rows without a chunk have no logit at all; theirs is nobody's.
        none = finished[..., None] == 0
        every = masked.masked_fill(none, 0.0).logsumexp(-1)
        taken = masked.gather(-1, best).masked_fill(none, 0.0).logsumexp(-1)
        return Selection(chosen, weights, (taken - every).exp())

    def _keys_and_values(self, context: TokenContext, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[B, S, G, P]`` and the chunks of them to read: of all tokens, or of the chosen if fewer."""
        size, heads = self.config.chunk, (-1, self.config.head_dim)
        length, chosen = chunks.shape[1:]
        if context.embedded is not None:
            parts: Iterable[Tensor] = [context.embedded]
        elif length * chosen * size < context.ids.shape[1]:
            flat = (chunks.clamp(min=0)[..., None] * size + torch.arange(size, device=chunks.device)).flatten(1)
            parts = [context.embed(context.ids.gather(1, flat))]
            own = torch.arange(length * chosen, device=chunks.device).view(1, length, chosen)
            chunks = torch.where(chunks < 0, chunks, own)
        else:
            parts = (context.embed(block) for block in context.ids.split(TOKEN_BLOCK, 1))
        keys, values = zip(*((self.k_proj(part), self.v_proj(part)) for part in parts), strict=True)
        return torch.cat(keys, 1).unflatten(-1, heads), torch.cat(values, 1).unflatten(-1, heads), chunks
