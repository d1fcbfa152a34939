"""How a model itself compares passages with a question: RESONA's chunk-and-search without its attention (RAG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.layers.retrieval.module import Retrieval
from longrecall.layers.tokens import TokenContext
from longrecall.models.recurrent_lm import RecurrentLM


class PassageSimilarity:
    """Passages and a question, both as token ids -> a score of each passage, -1 to 1.

    A model with retrieval layers: the first of them scores. A passage is encoded as a chunk of the layer is, of however
    many tokens; queries are the layer's at every token of the question, which the model reads alone, from its zero
    state. A passage's score is its highest cosine with any of them: chunk-and-search too takes what any token asks for.

    Any other model: the cosine between the mean token embeddings of passage and question.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def __call__(self, passages: Sequence[Sequence[int]], question: Sequence[int]) -> list[float]:
        """Return one score a passage; 0 for all of them when the question has no tokens."""
        if not passages or not question:
            return [0.0] * len(passages)
        found = next(_retrieval_layers(self._model), None)
        if found is None:
            table = self._model.get_input_embeddings()
            keys = torch.stack([self._embed(table, passage).mean(0) for passage in passages])
            queries = self._embed(table, question).mean(0, keepdim=True)
        else:
            index, layer = found
            keys = torch.stack([layer.encode_chunks(self._scaled(passage)) for passage in passages])
            queries = layer.encode_queries(self._layer_input(index, question))
        # [passages, E] and [tokens of the question, E]
        cosines = F.normalize(keys.float(), dim=-1) @ F.normalize(queries.float(), dim=-1).T
        return [float(score) for score in cosines.amax(1)]

    def _layer_input(self, index: int, question: Sequence[int]) -> Tensor:
        """Return what the mixer of layer `index` gets at every token of the question, ``[T, d]``."""
        out = self._model(self._ids(question)[None], output_hidden_states=True, use_cache=False, logits_to_keep=1)
        stream = out.hidden_states[index]
        normed: Tensor = self._model.model.layers[index].mixer_norm(stream)[0]
        return normed.to(self._model.dtype)

    def _scaled(self, ids: Sequence[int]) -> Tensor:
        """Return embeddings ``[T, d]`` as retrieval layers look them up."""
        context = TokenContext.read(None, self._ids(ids)[None], None, self._model.model.embeddings)
        return context.embed(context.ids)[0]

    def _embed(self, table: Any, ids: Sequence[int]) -> Tensor:
        found: Tensor = table(self._ids(ids)).float()
        return found

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.long, device=self._model.device)


def _retrieval_layers(model: Any) -> Iterator[tuple[int, Retrieval]]:
    """Yield (index of the layer, retrieval) from the first layer on; nothing for other models."""
    if isinstance(model, RecurrentLM):
        for index, layer in enumerate(model.model.layers):
            for module in layer.modules():
                if isinstance(module, Retrieval):
                    yield index, module
