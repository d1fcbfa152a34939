"""Context parallelism: one long sequence cut into pieces over the ranks of a process group, states carried across.

Every rank calls the model with its own piece inside `context_parallel`. See docs/context_parallelism.md.
"""

from longrecall.context.exchange import all_gather, from_last, from_previous, hand_on, received, summed
from longrecall.context.group import ContextGroup, RowPieces, context_parallel, row_pieces

__all__ = [
    "ContextGroup",
    "RowPieces",
    "all_gather",
    "context_parallel",
    "from_last",
    "from_previous",
    "hand_on",
    "received",
    "row_pieces",
    "summed",
]
