"""Memory of fixed shapes in which retrieval layers keep what they need of a prompt that is read in segments.

A pass over a whole prompt forms every key and value once. In segments they must stay: to form them again from the
token ids in each segment would cost as much as the segment itself. They go when the prompt has been read; what the
state keeps of a prompt is its token ids and a vector for every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longrecall.layers.retrieval.weights import RetrievalWeights
from longrecall.layers.tokens import KeptTokens, TokenContext


class PromptMemory:
    """Keys, values and chunk vectors of up to `capacity` tokens for each retrieval layer, written in place.

    Segments follow each other without gaps from the first token on, in all rows alike; their lengths are multiples of
    every layer's chunk.
    """

    def __init__(self, layers: Sequence[RetrievalWeights], rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.layers: Mapping[RetrievalWeights, KeptTokens] = {layer: _empty(layer, rows, capacity) for layer in layers}
        self.positions = torch.zeros(0, dtype=torch.long)

    def segment(self, ids: Tensor, before: Tensor, lookup: Callable[[Tensor], Tensor]) -> TokenContext:
        """What layers may look up in a segment ``[B, T]`` after `before` ``[B]`` tokens, the same number in all rows.

        `positions` ``[B, T]`` are then those of its tokens.

        Raises:
            ValueError: a length that chunks do not fill.
        """
        for layer in self.layers:
            if ids.shape[1] % (size := layer.config.chunk):
                raise ValueError(f"a segment of {ids.shape[1]} tokens is not filled by chunks of {size}")
        columns = torch.arange(ids.shape[1], device=ids.device)
        # Runs before a recording may read on past the capacity; what they write is written over.
        self.positions = (before[:, None] + columns).clamp(max=self.capacity - 1)
        context = TokenContext(ids, before, 0, lookup, None)
        return replace(context, embedded=context.embed(ids), memory=self)

    def keep(self, layer: RetrievalWeights, embedded: Tensor) -> KeptTokens:
        """All that the layer keeps, after adding a segment's embeddings ``[B, T, d]``."""
        kept, size = self.layers[layer], layer.config.chunk
        columns = self.positions[0]
        for memory, proj in ((kept.keys, layer.k_proj), (kept.values, layer.v_proj)):
            # Under autocast products have another dtype than weights.
            memory.index_copy_(1, columns, proj(embedded).unflatten(-1, memory.shape[2:]).to(memory.dtype))
        vectors = layer.encode_chunks(embedded.unflatten(1, (-1, size))).to(kept.vectors.dtype)
        kept.vectors.index_copy_(1, columns[::size] // size, vectors)
        return kept


def _empty(layer: RetrievalWeights, rows: int, capacity: int) -> KeptTokens:
    config, like = layer.config, layer.k_proj.weight
    tokens = (rows, capacity, config.kv_heads, config.head_dim)
    vectors = like.new_zeros((rows, capacity // config.chunk, config.encoder_dim))
    return KeptTokens(vectors, like.new_zeros(tokens), like.new_zeros(tokens))
