"""The tokens that a model has read, for layers that look them up again (retrieval)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.rotary import token_positions
from longrecall.ops import execution
from longrecall.ops.neighbours import all_columns
from longrecall.ops.projections.embedding import look_up

NO_TOKEN = -1
"""Fills a row that has fewer tokens than another one."""

EMBEDDING_EPS = 1e-8
"""Under the mean square of an embedding, whose entries are 1e-2 and more in every model we know."""


class TokenEmbedding(nn.Embedding):
    """A table of embeddings ``[V, d]``, whose gradient is summed by `ops.embedding.look_up`.

    Where torch's options are set (a padding index, a largest norm and the like), it is torch's own.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids int64 ``[...]`` -> embeddings ``[..., d]``."""
        if self.padding_idx is not None or self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(ids)
        return look_up(ids, self.weight)


class KeptTokens(NamedTuple):
    """What a layer keeps of a prompt that is read in segments; what lies past the tokens read so far is unspecified.

    `vectors` ``[B, N, E]`` of its chunks, `keys` and `values` ``[B, N * U, G, P]`` of its tokens.
    """

    vectors: Tensor
    keys: Tensor
    values: Tensor


class SegmentMemory(Protocol):
    """Where layers keep what they need of the segments before (`layers/retrieval/prompt_memory.py`).

    `capacity`: tokens that fit; `positions` ``[B, T]``: those of the tokens of the segment that is being read.
    """

    capacity: int
    positions: Tensor

    def keep(self, layer: Any, embedded: Tensor) -> KeptTokens:
        """All that the layer keeps, with the embeddings ``[B, T, d]`` of this segment added."""


class PieceOfSegment(NamedTuple):
    """Where this rank's piece lies in a segment that is cut over ranks (context parallelism)."""

    columns: int
    """Columns of the whole segment."""
    first: int
    """The column of the segment with which the piece begins."""
    before: Tensor
    """int64 ``[B]``: real tokens of the segment before the piece."""
    embedded: Tensor | None
    """``[B, T, d]``, what `embed` gives for the piece, when the segment is the first and has no padding."""


@dataclass(frozen=True)
class TokenContext:
    """What a layer may look up while it reads a segment: every token of its row so far, the segment's own included.

    Attributes:
        ids: int32 ``[B, S]``: the real tokens of each row from the left without gaps, then -1.
        before: int64 ``[B]``: how many of them were read before this segment.
        earlier: the columns that those took: a token in column i of the segment has position `earlier` + i at most.
        lookup: token ids of any shape -> their embeddings ``[..., d]``.
        embedded: ``[B, S, d]``, what `embed` gives for `ids`, when this segment is the first: nothing was read before.
        memory: where what was read before is kept instead, in segments of fixed shapes; `ids` and `embedded` are then
            those of the segment alone, of which the last may be padding in all rows.
        piece: where a rank reads no more than a piece of the segment; `ids` are those of the whole segment then, and
            nothing is in `embedded`.
    """

    ids: Tensor
    before: Tensor
    earlier: int
    lookup: Callable[[Tensor], Tensor]
    embedded: Tensor | None
    memory: SegmentMemory | None = None
    piece: PieceOfSegment | None = None

    @classmethod
    def read(
        cls, earlier: Tensor | None, ids: Tensor, mask: Tensor | None, lookup: Callable[[Tensor], Tensor]
    ) -> TokenContext:
        """Append a segment.

        Args:
            earlier: int32 ``[B, C]``, the `ids` after the segment before; None or C = 0 for the first one.
            ids: integers ``[B, T]``.
            mask: bool ``[B, T]``, False = padding, which is left out; None = all are real.
        """
        earlier = ids.new_zeros((ids.shape[0], 0), dtype=torch.int32) if earlier is None else earlier
        if (group := execution.context()) is not None:
            return cls._of_a_piece(earlier, ids, mask, lookup, group.rank)
        before = (earlier != NO_TOKEN).sum(1)
        joined = _append(earlier, before, ids.to(torch.int32), mask)
        context = cls(joined, before, earlier.shape[1], lookup, None)
        if earlier.shape[1]:
            return context
        return cls(joined, before, 0, lookup, context.embed(joined))

    @classmethod
    def _of_a_piece(
        cls, earlier: Tensor, ids: Tensor, mask: Tensor | None, lookup: Callable[[Tensor], Tensor], rank: int
    ) -> TokenContext:
        """As `read`, for this rank's piece of the segment."""
        every, first = all_columns(ids.to(torch.int32)), rank * ids.shape[1]
        before = (earlier != NO_TOKEN).sum(1)
        if mask is None:
            context = cls(_append(earlier, before, every, None), before, earlier.shape[1], lookup, None)
            embedded = None if earlier.shape[1] else context.embed(ids)
            own = PieceOfSegment(every.shape[1], first, torch.full_like(before, first), embedded)
        else:
            real = all_columns(mask)
            context = cls(_append(earlier, before, every, real), before, earlier.shape[1], lookup, None)
            own = PieceOfSegment(every.shape[1], first, real[:, :first].sum(1), None)
        return replace(context, piece=own)

    @property
    def columns_before(self) -> int:
        """A token in column i of what a layer reads now has this position + i at most."""
        return self.earlier + (0 if self.piece is None else self.piece.first)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of `ids` (-1 stands for any token) ``[..., d]``, each scaled to mean square 1.

        Embedding tables differ a hundredfold in scale; a layer that reads them unscaled would need another
        initialisation for each. Directions, and with them cosines, stay.
        """
        found = self.lookup(ids.clamp(min=0))
        wide = found if found.dtype == torch.float64 else found.float()
        return F.rms_norm(wide, (found.shape[-1],), eps=EMBEDDING_EPS).to(found.dtype)

    def finished(self, chunk: int, length: int, mask: Tensor | None) -> Tensor:
        """Chunks of `chunk` tokens that end before each token of the segment: int64 ``[B, T]`` for T = `length`."""
        before = self.before if self.piece is None else self.before + self.piece.before
        return token_positions(before, length, mask) // chunk


def token_argument(config: MixerConfig, context: TokenContext | None) -> dict[str, TokenContext | None]:
    """The argument that a mixer gets besides the usual ones: ``context`` if it looks up tokens, nothing if not."""
    return {"context": context} if config.reads_tokens else {}


def _append(earlier: Tensor, before: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None and not earlier.shape[1]:
        return ids
    # Without padding the fullest row grows by T; with it only the counts can tell.
    width = earlier.shape[1] + ids.shape[1] if mask is None else int((before + mask.sum(1)).max())
    width = max(width, earlier.shape[1])
    target = token_positions(before, ids.shape[1], mask)
    if mask is not None:
        target = target.masked_fill(~mask, width)
    room = earlier.new_full((earlier.shape[0], width + 1 - earlier.shape[1]), NO_TOKEN)
    return torch.cat([earlier, room], 1).scatter(1, target, ids)[:, :width]
