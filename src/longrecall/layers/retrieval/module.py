"""Retrieval inside a layer (RESONA): every token attends to the few chunks of the context that resemble it most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from longrecall.layers.access import visitable
from longrecall.layers.mixers.base import LayerState, state_under
from longrecall.layers.retrieval import fused
from longrecall.layers.retrieval.weights import RetrievalWeights, blended
from longrecall.layers.tokens import TokenContext
from longrecall.ops.neighbours import all_columns
from longrecall.ops.retrieval.op import best_chunks, selected_attention

TOKEN_BLOCK = 4096
"""Earlier tokens embedded at once; only their keys and values are kept."""


class Selection(NamedTuple):
    """What a token reads: `chunks` ``[B, T, C]`` (-1 = none); with `weighted` their logits and their joint share."""

    chunks: Tensor
    weights: Tensor | None
    share: Tensor | None


class Retrieval(RetrievalWeights):
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

    wants_whole_weights: ClassVar[bool] = True
    """Its step and its segments form keys and values of all token ids at once, with kernels for plain weights."""

    @visitable
    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        context: TokenContext,
        **carried: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the new state; `context` ends with the tokens of x."""
        y, after = self._nothing(x), dict[str, Tensor]()
        if self.base is not None:
            y, after = self.base(x, state_under(state, "base"), mask=mask, position=position, **carried)
        y, vectors = self.retrieve(x, y, None if state is None else state["chunk"], context, mask)
        return y, {f"base.{name}": tensor for name, tensor in after.items()} | {"chunk": vectors}

    def _nothing(self, x: Tensor) -> Tensor:
        """What the mixer would return where there is none: zeros."""
        return x.new_zeros(*x.shape[:-1], self.o_proj.out_features)

    def retrieve(
        self, x: Tensor, y: Tensor, earlier: Tensor | None, context: TokenContext, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x and the mixer's output y ``[B, T, d]``, earlier chunk vectors -> the layer's output, all chunk vectors.

        Where the context keeps its width (decoding in place) so do the vectors, and nothing waits for the GPU. Where it
        has a memory the vectors are in there, and what is returned are the earlier ones.
        """
        if context.memory is not None:
            assert earlier is not None
            return self._retrieve_in_memory(x, y, context, mask), earlier
        length = x.shape[1] if context.piece is None else context.piece.columns
        vectors = self._chunk_vectors(earlier, context, length, padded=mask is not None)
        if not vectors.shape[1]:
            return y, vectors
        if fused.why_not(self, x, context, mask) is None:
            return fused.read(self, x, y, vectors, context), vectors
        finished = context.finished(self.config.chunk, x.shape[1], mask)
        chosen = self._select(x, vectors, finished, context.columns_before)
        keys, values, local = self._keys_and_values(context, chosen.chunks)
        found = self._attend(x, keys, values, chosen._replace(chunks=local))
        return self._blended(x, y, found, finished > 0), vectors

    def _retrieve_in_memory(self, x: Tensor, y: Tensor, context: TokenContext, mask: Tensor | None) -> Tensor:
        memory = context.memory
        assert memory is not None and context.embedded is not None
        kept = memory.keep(self, context.embedded)
        if fused.why_not(self, x, context, mask) is None:
            return fused.read(self, x, y, kept.vectors, context, kept)
        finished = memory.positions // self.config.chunk
        chosen = self._select(x, kept.vectors, finished, memory.capacity)
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
        both = blended(self.config.alpha, y, found) if self.blend is None else self.blend(x, y, found)
        return torch.where(any_chunk[..., None], both, y)

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
        if (own := self._whole_chunks(context)) is not None:
            return all_columns(self.encode_chunks(own.unflatten(1, (-1, size))))
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
        # A token before the end of the first chunk has no logits; its share is not used.
        none = finished[..., None] == 0
        every = masked.masked_fill(none, 0.0).logsumexp(-1)
        taken = masked.gather(-1, best).masked_fill(none, 0.0).logsumexp(-1)
        return Selection(chosen, weights, (taken - every).exp())

    def _keys_and_values(self, context: TokenContext, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[B, S, G, P]`` and the chunks of them to read: of all tokens, or of the chosen if fewer."""
        size, heads = self.config.chunk, (-1, self.config.head_dim)
        length, chosen = chunks.shape[1:]
        if (own := self._whole_chunks(context)) is not None:
            keys, values = (all_columns(proj(own)).unflatten(-1, heads) for proj in (self.k_proj, self.v_proj))
            return keys, values, chunks
        if context.embedded is not None:
            parts: Iterable[Tensor] = [context.embedded]
        elif length * chosen * size < context.ids.shape[1]:
            flat = (chunks.clamp(min=0)[..., None] * size + torch.arange(size, device=chunks.device)).flatten(1)
            parts = [context.embed(context.ids.gather(1, flat))]
            own = torch.arange(length * chosen, device=chunks.device).view(1, length, chosen)
            chunks = torch.where(chunks < 0, chunks, own)
        else:
            parts = (context.embed(block) for block in context.ids.split(TOKEN_BLOCK, 1))
        both = zip(*((self.k_proj(part), self.v_proj(part)) for part in parts), strict=True)
        keys, values = (torch.cat(blocks, 1).unflatten(-1, heads) for blocks in both)
        return keys, values, chunks

    def _whole_chunks(self, context: TokenContext) -> Tensor | None:
        """The embeddings ``[B, T, d]`` of this rank's piece of a segment, where every piece is whole chunks of it.

        Then every rank encodes and projects its own tokens, and the ranks exchange what comes of it. In other pieces
        every rank does so for all tokens, by their ids.
        """
        own = None if context.piece is None else context.piece.embedded
        return None if own is None or own.shape[1] % self.config.chunk else own
