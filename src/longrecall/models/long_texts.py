"""What a forward pass reads and what is wanted of it, for somebody who reads long texts piece by piece.

Reading in pieces stands above the model, in `inference/reader.py`. It puts itself in as `RecurrentLM.text_reader` when
it is imported, which importing the model does (`_registration.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from longrecall.models.losses import Items
from longrecall.models.packed_documents import Fragments
from longrecall.models.state import RecurrentState


class Text(NamedTuple):
    """What is read: int ids ``[B, T]`` or embeddings ``[B, T, d]``, and from where.

    Attributes:
        ids, embeddings: one of them; ids may also be there beside the embeddings, for layers that look them up.
        mask: bool ``[B, T]``, False = padding; None = all are real.
        state: the state before; None = that before the first token.
        documents: where documents lie that share rows, each to be read from its own state; None = a row is one.
    """

    ids: Tensor | None
    embeddings: Tensor | None
    mask: Tensor | None
    state: RecurrentState | None
    documents: Fragments | None

    @property
    def source(self) -> Tensor:
        """What is looked up or read as it is ``[B, T, ...]``."""
        source = self.ids if self.embeddings is None else self.embeddings
        assert source is not None
        return source


class Wanted(NamedTuple):
    """What the caller keeps; the arguments of `RecurrentLM.forward` of these names."""

    labels: Tensor | None
    items: Items
    logits_to_keep: int | Tensor
    loss_only: bool
    hidden_states: bool


class Read(NamedTuple):
    """What was read: logits ``[B, n, vocab]``, the loss, the new state, the streams ``[B, T, d]``; None if unwanted."""

    logits: Tensor | None
    loss: Tensor | None
    state: RecurrentState
    streams: list[Tensor]


class TextReader(Protocol):
    """Reads a long text in another way than one pass of the layers over all of it."""

    def may_cut(self, source: Tensor) -> bool:
        """Whether `read` is worth a call for ids or embeddings ``[B, T, ...]`` of this size; answers at once."""
        ...

    def read(self, model: Any, text: Text, wanted: Wanted) -> Read | None:
        """What a forward pass computes, but for sums in another order; None where one pass is to read the text."""
        ...
