"""One decoding step of a retrieval layer around the step of its mixer, on buffers with room for the whole context."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.decoding import Buffers, FewRowsStream, FusedStream, Step, Stream
from longrecall.layers.norm import RMSNorm
from longrecall.layers.retrieval import Retrieval
from longrecall.layers.tokens import EMBEDDING_EPS, TokenContext
from longrecall.ops.retrieval import selected_attention
from longrecall.ops.triton import backend as triton

WIDEST = 8192
"""Embeddings that one program of the kernels holds."""


class Aside(Stream):
    """Reads another stream, and keeps a layer's output ``[B, d]`` aside instead of adding it.

    The first `product` is put off: what comes after the layer may form it together with others.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.x, stream.dtype)
        self.stream = stream
        self.found: Tensor | None = None
        self.product: tuple[Tensor, Tensor] | None = None

    def normed(self, norm: RMSNorm) -> Tensor:
        return self.stream.normed(norm)

    def project(self, norm: RMSNorm, weights: list[Tensor]) -> list[Tensor]:
        return self.stream.project(norm, weights)

    def add(self, y: Tensor) -> None:
        self.found = y if self.found is None else self.found + y

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        if self.found is None and self.product is None:
            self.product = (y, weight)
        else:
            super().add_product(y, weight)

    def result(self) -> Tensor:
        """The layer's output ``[B, d]``, the product included that was put off."""
        if self.product is not None:
            self.add(F.linear(*self.product))
            self.product = None
        assert self.found is not None
        return self.found


def retrieval_step(mixer: Retrieval, base: Step, tokens: Tensor, embeddings: nn.Embedding) -> Step:
    """The step of a retrieval layer; `base` is that of its mixer.

    `tokens` int32 ``[B, room]`` holds the ids of the context, the newest at `position`; -1 fills the room. The layer's
    buffer `chunk` is ``[B, room // U, E]``: shapes do not change while the context grows.
    """

    def step(stream: Stream, norm: RMSNorm, buffers: Buffers, position: Tensor) -> None:
        own = {name.removeprefix("base."): tensor for name, tensor in buffers.items() if name.startswith("base.")}
        aside = Aside(stream)
        base(aside, norm, own, position)
        chunk = buffers["chunk"]
        if isinstance(stream, FusedStream) and _declines(mixer, embeddings, chunk) is None:
            _fused(mixer, stream, norm, aside, chunk, tokens, position, embeddings.weight)
            return
        context = TokenContext(tokens, position, tokens.shape[1], embeddings, None)
        x, y = stream.normed(norm)[:, None], aside.result()[:, None]
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
    stream: FusedStream,
    norm: RMSNorm,
    base: Aside,
    vectors: Tensor,
    tokens: Tensor,
    position: Tensor,
    table: Tensor,
) -> None:
    """`Retrieval.retrieve` for one token in few launches, added to the stream; `vectors` in place.

    `base` holds what the layer's mixer gave.
    """
    from longrecall.ops.triton import retrieval_decoding as kernels

    config, own = mixer.config, mixer.blend
    by_input = None if own is None else own.weight
    weights = [mixer.q_proj.weight, mixer.query_encoder.weight, *([] if by_input is None else [by_input])]
    q, queries, *rest = stream.project(norm, weights)
    chosen, local, logits, share = kernels.choose(
        table, tokens, position, mixer.chunk_encoder.weight, vectors, queries, mixer.temperature,
        config.chunk, config.candidates, config.top_k, EMBEDDING_EPS,
    )  # fmt: skip
    projections = (mixer.k_proj.weight, mixer.v_proj.weight)
    read = kernels.keys_and_values(table, tokens, chosen, projections, config.chunk, EMBEDDING_EPS)
    heads = (-1, config.head_dim)
    keys, values = (x.unflatten(-1, heads) for x in read)
    q = q[:, None].unflatten(-1, heads)
    found = selected_attention(q, keys, values, local, logits, config.chunk, backend="triton").flatten(1)
    how = (share, position, config.chunk, config.alpha, None if own is None else own.bias, rest[0] if rest else None)
    if isinstance(stream, FewRowsStream) and base.product is not None:
        # The products before have added to `x` whatever was yet to be added.
        kernels.add_blended_products(stream.x, base.product, (found, mixer.o_proj.weight), *how)
    else:
        stream.add(kernels.blend(base.result(), F.linear(found, mixer.o_proj.weight), *how))
