"""A tiny checkpoint with a recurrence, a convolution and a window, far enough from zero to say different things."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    layers = [
        {"mixer": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8, "conv_width": 3}},
        {"mixer": {"type": "attention", "num_heads": 2, "head_dim": 8, "window": 8}},
    ]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=16, layers=layers, tie_word_embeddings=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
