"""Context parallelism: one long sequence cut into pieces over the ranks of a process group, states carried across.

Every rank calls the model with its own piece inside `context_parallel`. See docs/context_parallelism.md.
"""

from longrecall.ops.context.cutting import own_piece
from longrecall.ops.context.exchange import all_gather, from_ends, from_last, from_previous, hand_on, received, summed
from longrecall.ops.context.group import ContextGroup, RowPieces
from longrecall.ops.context.scopes import context_parallel, row_pieces

__all__ = [
    "ContextGroup",
    "RowPieces",
    "all_gather",
    "context_parallel",
    "from_ends",
    "from_last",
    "from_previous",
    "hand_on",
    "own_piece",
    "received",
    "row_pieces",
    "summed",
]
