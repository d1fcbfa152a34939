"""One decoding step of a retrieval layer around the step of its mixer, on buffers with room for the whole context."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.decoding import Buffers, FusedStream, Step, Stream
from longrecall.layers.norm import RMSNorm
from longrecall.layers.retrieval import Retrieval
from longrecall.layers.tokens import EMBEDDING_EPS, TokenContext
from longrecall.ops.retrieval import best_chunks, selected_attention
from longrecall.ops.triton import backend as triton

WIDEST = 8192
"""Embeddings that one program of the kernels holds."""


class Aside(Stream):
    """Reads another stream, and keeps a layer's output `found` ``[B, d]`` aside instead of adding it."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.x, stream.dtype)
        self.stream = stream
        self.found: Tensor | None = None

    def normed(self, norm: RMSNorm) -> Tensor:
        return self.stream.normed(norm)

    def project(self, norm: RMSNorm, weights: list[Tensor]) -> list[Tensor]:
        return self.stream.project(norm, weights)

    def add(self, y: Tensor) -> None:
        self.found = y if self.found is None else self.found + y


def retrieval_step(mixer: Retrieval, base: Step, tokens: Tensor, embeddings: nn.Embedding) -> Step:
    """The step of a retrieval layer; `base` is that of its mixer.

    `tokens` int32 ``[B, room]`` holds the ids of the context, the newest at `position`; -1 fills the room. The layer's
    buffer `chunk` is ``[B, room // U, E]``: shapes do not change while the context grows.
    """

    def step(stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor) -> None:
        own = {name.removeprefix("base."): tensor for name, tensor in buffers.items() if name.startswith("base.")}
        aside = Aside(stream)
        base(aside, norm, own, position)
        assert aside.found is not None
        chunk = buffers["chunk"]
        if isinstance(stream, FusedStream) and _declines(mixer, embeddings, chunk) is None:
            stream.add(_fused(mixer, stream, norm, aside.found, chunk, tokens, position, embeddings.weight))
            return
        context = TokenContext(tokens, position, tokens.shape[1], embeddings, None)
        x, y = stream.normed(norm)[:, None], aside.found[:, None]
        y, vectors = mixer.retrieve(x, y, chunk, context, None)
        chunk.copy_(vectors)
        stream.add(y[:, 0])

    return step


def _declines(mixer: Retrieval, embeddings: nn.Embedding, vectors: Tensor) -> str | None:
    """Why the kernels cannot serve this layer, in words; None = they can."""
    config, like = mixer.config, embeddings.weight
    if like.shape[1] > WIDEST:
        return f"embeddings are at most {WIDEST} wide; got {like.shape[1]}"
    if not vectors.shape[1] or like.dtype != mixer.k_proj.weight.dtype or embeddings.max_norm is not None:
        return "no room for a chunk, or embeddings of another kind than the layer's weights"
    q, chosen = like.new_empty((1, 1, config.num_heads, config.head_dim)), like.new_empty((1, config.candidates))
    found = triton.declines("best_chunks", {"queries": vectors, "chosen": chosen})
    return found or triton.declines("selected_attention", {"q": q, "k": q[:, :, : config.kv_heads], "v": q})


def _fused(
    mixer: Retrieval,
    stream: Stream,
    norm: RMSNorm,
    y: Tensor,
    vectors: Tensor,
    tokens: Tensor,
    position: Tensor,
    table: Tensor,
) -> Tensor:
    """`Retrieval.retrieve` for one token in few launches: y ``[B, d]`` -> the layer's output; `vectors` in place."""
    from longrecall.ops.triton.retrieval_decoding import add_chunk_vector, blend, read_chunks

    config, own = mixer.config, mixer.blend
    by_input = None if own is None else own.weight
    weights = [mixer.q_proj.weight, mixer.query_encoder.weight, *([] if by_input is None else [by_input])]
    q, queries, *rest = stream.project(norm, weights)
    # The chunk that this token ends ends before the next token only: it may not be chosen yet.
    add_chunk_vector(table, tokens, position, mixer.chunk_encoder.weight, vectors, config.chunk, EMBEDDING_EPS)
    finished = torch.div(position, config.chunk, rounding_mode="floor")[:, None]
    # A query's norm changes no order; `read_chunks` divides the scores by it.
    offered = best_chunks(queries[:, None].contiguous(), vectors, finished, config.candidates, backend="triton")
    read, local, logits, share = read_chunks(
        table, tokens, *offered, queries, mixer.temperature, config.top_k, config.chunk, EMBEDDING_EPS
    )
    heads = (-1, config.head_dim)
    keys, values = (F.linear(read, proj.weight).unflatten(-1, heads) for proj in (mixer.k_proj, mixer.v_proj))
    q = q[:, None].unflatten(-1, heads)
    found = selected_attention(q, keys, values, local, logits, config.chunk, backend="triton")
    found = F.linear(found.flatten(1), mixer.o_proj.weight)
    bias = None if own is None else own.bias
    return blend(y, found, share, position, config.chunk, config.alpha, bias, rest[0] if rest else None)
