"""The table of embeddings: torch's own wherever its options are set, and all that transformers does with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longrecall.layers.tokens import TokenEmbedding
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.projections import embedding


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 1}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_options_are_those_of_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours = TokenEmbedding(7, 4, **options)
    theirs, ids = nn.Embedding(7, 4, **options), torch.tensor([[1, 3, 3], [6, 1, 0]])
    theirs.load_state_dict(ours.state_dict())
    looked_up: list[int] = []
    real = embedding.look_up
    monkeypatch.setattr("longrecall.layers.tokens.look_up", lambda *args: looked_up.append(1) or real(*args))
    results = [table(ids) for table in (ours, theirs)]
    assert torch.equal(*results) and bool(looked_up) is not bool(options)
    for y in results:
        y.sum().backward()
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    assert ours.weight.grad.is_sparse is bool(options.get("sparse"))
    assert torch.equal(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_grew_is_trained_and_saved(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = {"mixer": {"type": "retnet", "num_heads": 2, "key_dim": 4, "value_dim": 4}, "mlp_size": 0}
    model = RecurrentLM(RecurrentConfig(vocab_size=11, hidden_size=8, layers=[layer], tie_word_embeddings=tied))
    before, size = model.get_input_embeddings().weight.detach().clone(), model.config.vocab_size
    model.resize_token_embeddings(size + 3)
    table = model.get_input_embeddings()
    assert isinstance(table, TokenEmbedding) and (model.lm_head.weight is table.weight) is tied
    assert table.weight.shape[0] == size + 3 and torch.equal(table.weight[:size], before)
    ids = torch.tensor([[1, size + 2, 4, size + 2]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert table.weight.grad is not None and table.weight.grad[size + 2].any()
    # Tied, the gradients of both ends add up: of tokens that were not read too.
    assert bool(table.weight.grad[size].any()) is tied
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.get_input_embeddings().weight, table.weight)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) is tied
