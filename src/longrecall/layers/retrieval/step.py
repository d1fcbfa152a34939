"""One decoding step of a retrieval layer around the step of its mixer, on buffers with room for the whole context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.layers.norm import Norm
from longrecall.layers.retrieval.module import Retrieval
from longrecall.layers.stepping.step import (
    Buffers,
    NestedSteps,
    Progress,
    StepSettings,
    part_under,
    step_of,
)
from longrecall.layers.stepping.stream import InnerStream, Stream
from longrecall.layers.tokens import EMBEDDING_EPS, TokenContext
from longrecall.ops.backends import why_no_kernel

WIDEST = 8192
"""Embeddings that one program of the kernels holds."""

LARGEST_MEMORY = 256 << 20
"""Bytes that keys and values of all token ids may take in a layer; beyond, plain torch forms those that are read."""

ID_BLOCK = 16384
"""Token ids embedded at once; only their keys and values are kept."""


class RetrievalStep(NestedSteps):
    """The step of a retrieval layer around the step `base` of its mixer.

    The settings' `tokens` hold the ids of the context, the newest at `position`; -1 fills the room. The layer's buffer
    `chunk` is ``[B, room // U, E]``: shapes do not change while the context grows.

    Keys and values depend on a token's id alone, so the kernels look them up in `memory` ``[vocab, 2, G, P]``, which
    `form_tables` makes from the weights.
    """

    def __init__(self, config: RetrievalConfig, mixer: nn.Module, settings: StepSettings) -> None:
        base = None if config.base is None else step_of(config.base, mixer.get_submodule("base"), settings)
        super().__init__({} if base is None else {"base": base})
        assert settings.tokens is not None
        self.mixer = cast(Retrieval, mixer)
        self.base, self.settings, self.tokens = base, settings, settings.tokens
        self.embeddings = settings.embeddings
        self.memory: Tensor | None = None
        if (
            settings.fused
            and base is not None
            and _why_no_kernels(self.mixer, self.embeddings, self.tokens.shape[1]) is None
        ):
            sizes, table = self.mixer.config, self.embeddings.weight
            self.memory = torch.zeros((table.shape[0], 2, sizes.kv_heads, sizes.head_dim)).to(table)

    def allocate(self) -> dict[str, Tensor]:
        sizes, settings = self.mixer.config, self.settings
        shape = (settings.batch, settings.room // sizes.chunk, sizes.encoder_dim)
        chunk = torch.zeros(shape, dtype=settings.dtype, device=self.embeddings.weight.device)
        return super().allocate() | {"chunk": chunk}

    def clear(self, buffers: Buffers) -> None:
        super().clear(buffers)
        buffers["chunk"].zero_()

    def load(self, buffers: Buffers, state: dict[str, Tensor], position: Tensor) -> int:
        vectors = state["chunk"]
        buffers["chunk"][:, : vectors.shape[1]].copy_(vectors)
        return super().load(buffers, state, position)

    def export(self, buffers: Buffers, progress: Progress) -> dict[str, Tensor]:
        vectors = buffers["chunk"][:, : progress.context // self.mixer.config.chunk]
        return super().export(buffers, progress) | {"chunk": vectors}

    def tables(self) -> Sequence[RetrievalStep]:
        return () if self.memory is None else (self,)

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        mixer, chunk = self.mixer, buffers["chunk"]
        if self.base is None:
            self._alone(stream, norm, chunk, position)
            return
        by_input = None if mixer.blend is None else mixer.blend.weight
        weights = [mixer.q_proj.weight, mixer.query_encoder.weight, *([] if by_input is None else [by_input])]
        fused = stream.fused and self.memory is not None
        inner = InnerStream(stream, weights if fused else [])
        self.base(inner, norm, part_under(buffers, "base"), position)
        if fused:
            self._fused(stream, norm, inner, chunk, position)
            return
        self._plain(stream, stream.normed(norm)[:, None], inner.result()[:, None], chunk, position)

    def _alone(self, stream: Stream, norm: Norm | None, chunk: Tensor, position: Tensor) -> None:
        """Retrieval without a mixer beside it."""
        x = stream.normed(norm)[:, None]
        self._plain(stream, x, x.new_zeros(len(x), 1, self.mixer.o_proj.out_features), chunk, position)

    def _plain(self, stream: Stream, x: Tensor, y: Tensor, chunk: Tensor, position: Tensor) -> None:
        """x and the mixer's output y ``[B, 1, d]``, in plain torch, added to the stream."""
        context = TokenContext(self.tokens, position, self.tokens.shape[1], self.embeddings, None)
        y, vectors = self.mixer.retrieve(x, y, chunk, context, None)
        chunk.copy_(vectors)
        stream.add(y[:, 0])

    def _fused(self, stream: Stream, norm: Norm | None, base: InnerStream, vectors: Tensor, position: Tensor) -> None:
        """`Retrieval.retrieve` for one token in few launches, added to the stream; `vectors` in place.

        `base` holds what the layer's mixer gave.
        """
        from longrecall.ops.decoding.triton import retrieval as kernels

        mixer, own, memory = self.mixer, self.mixer.blend, self.memory
        assert memory is not None
        config = mixer.config
        q, queries, *rest = base.projected(norm)
        choice = kernels.choose(
            self.embeddings.weight, self.tokens, position, mixer.chunk_encoder.weight, vectors, queries,
            config.chunk, config.candidates, EMBEDDING_EPS,
        )  # fmt: skip
        found = kernels.read(
            q, queries, mixer.temperature, position, choice, self.tokens, memory,
            config.chunk, config.top_k, vectors.shape[1],
        )  # fmt: skip
        how = (position, config.chunk, config.alpha, None if own is None else own.bias, rest[0] if rest else None)
        if stream.adds_inside_products and base.put_off is not None:
            # The products before have added to `x` whatever was yet to be added.
            kernels.add_blended_products(stream.x, base.put_off, (found, mixer.o_proj.weight), *how)
        else:
            stream.add(kernels.blend(base.result(), F.linear(found, mixer.o_proj.weight), None, *how))


@torch.no_grad()
def form_tables(steps: Sequence[RetrievalStep]) -> None:
    """Form the keys and values of every token id anew, for all steps that look them up.

    At every load of a state, since nothing tells for certain that the weights are those of the last time: a write
    through `.data` leaves no trace. So it is kept to one launch a layer and block of ids, beside a few for all of them.
    """
    looking = [(step, step.memory) for step in steps if step.memory is not None]
    if not looking:
        return
    first = looking[0][0]
    nobody = first.tokens.new_zeros(0)
    context = TokenContext(nobody, nobody, 0, first.embeddings, None)
    ids = torch.arange(first.embeddings.num_embeddings, device=first.tokens.device)
    weights = [torch.cat([step.mixer.k_proj.weight, step.mixer.v_proj.weight]).t() for step, _ in looking]
    for start in range(0, len(ids), ID_BLOCK):
        own = slice(start, start + ID_BLOCK)
        embedded = context.embed(ids[own])
        for (_, memory), weight in zip(looking, weights, strict=True):
            torch.mm(embedded, weight, out=memory[own].flatten(1))


def _why_no_kernels(mixer: Retrieval, embeddings: nn.Embedding, room: int) -> str | None:
    """Why the kernels cannot serve this layer, in words; None = they can."""
    config, like = mixer.config, embeddings.weight
    if like.shape[1] > WIDEST:
        return f"embeddings are at most {WIDEST} wide; got {like.shape[1]}"
    if room < config.chunk or like.dtype != mixer.k_proj.weight.dtype or embeddings.max_norm is not None:
        return "no room for a chunk, or embeddings of another kind than the layer's weights"
    if like.shape[0] * 2 * config.kv_heads * config.head_dim * like.itemsize > LARGEST_MEMORY:
        return f"keys and values of {like.shape[0]} token ids take more than {LARGEST_MEMORY >> 20} MiB"
    q, chosen = like.new_empty((1, 1, config.num_heads, config.head_dim)), like.new_empty((1, config.candidates))
    vectors = like.new_empty((1, 1, config.encoder_dim))
    found = why_no_kernel("best_chunks", {"queries": vectors, "chosen": chosen})
    return found or why_no_kernel("selected_attention", {"q": q, "k": q[:, :, : config.kv_heads], "v": q})
