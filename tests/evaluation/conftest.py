"""A tiny model with every kind of state, and the byte tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import RecurrentConfig, RecurrentLM
from longrecall.cli import eval as verb
from longrecall.models.byte_tokenizer import byte_tokenizer


def tiny_model(seed: int = 0) -> RecurrentLM:
    """A random model of 258 tokens whose initial weights are large enough that its greedy text is not constant."""
    torch.manual_seed(seed)
    config = RecurrentConfig(
        vocab_size=258,
        hidden_size=16,
        tie_word_embeddings=False,
        initializer_range=0.6,
        layers=[
            {"mixer": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8}, "mlp_size": 16},
            {"mixer": {"type": "mamba2", "inner_dim": 32, "head_dim": 8, "state_dim": 4}, "mlp_size": 0},
        ],
    )
    return RecurrentLM(config).eval()


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tests share their cores with others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> RecurrentLM:
    return tiny_model()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def checkpoint(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> str:
    """The tiny model and its tokenizer, saved."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def command(*words: str) -> int:
    """Run the verb with these words; returns its exit code."""
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    return verb.run(parser.parse_args(words))
