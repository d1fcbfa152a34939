from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.recipe import Recipe

MAMBA = {"type": "mamba2", "inner_dim": 32, "head_dim": 16, "state_dim": 4}
GLA = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8, "conv_width": 3}
WIDER = {**MAMBA, "state_dim": 8}


def tiny_model(*mixers: dict[str, Any], seed: int = 0) -> RecurrentLM:
    torch.manual_seed(seed)
    layers = [{"mixer": mixer, "mlp_size": 0 if mixer["type"] == "mamba2" else 24} for mixer in mixers or (MAMBA, GLA)]
    # Some mixers read the residual stream channel by channel and say how wide it is.
    width = next((mixer[key] for mixer in mixers for key in ("channels", "input_dim") if key in mixer), 16)
    return RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=width, layers=layers))


@pytest.fixture
def make_model() -> Callable[..., RecurrentLM]:
    """Model factory: mixer descriptions (default: Mamba-2, GLA with convolutions) and a seed."""
    return tiny_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint with a Mamba-2 and a GLA layer, both with convolutions; the second layer's keys were touched."""
    record = {"method": "merge_heads", "touched": ["model.layers.1.mixer.k_proj.weight", "gone.weight"]}
    save(tiny_model(), tmp_path / "base", byte_tokenizer(), [record])
    return tmp_path / "base"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten documents of different lengths."""
    path = tmp_path / "text.txt"
    path.write_text("\f".join(f"Story {i}. " + f"The {i}th fox met a dog.\n" * (20 + i) for i in range(10)), "utf-8")
    return path


@pytest.fixture
def make_recipe(base: Path, text: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Recipe factory: dotted overrides on a run of six steps over text and phone books, with state passing."""

    def make(*overrides: str) -> Recipe:
        data = {
            "model": {"checkpoint": str(base)},
            "data": {
                "context_length": 48,
                "sources": [{"kind": "text", "path": str(text)}, {"kind": "phonebook", "pairs": [2, 4], "weight": 0.5}],
            },
            "optimizer": {"learning_rate": 0.01, "touched": "3x", "warmup": 2},
            "initial_state": {"kind": "state_passing", "probability": 0.7},
            "run": {
                "output": str(tmp_path / "out"),
                "steps": 6,
                "batch_size": 3,
                "gradient_accumulation": 2,
                "log_every": 1,
                "report_to": "none",
            },
        }
        return Recipe.from_dict(data, overrides)

    return make
