"""Tiny checkpoints that the tests of reading, writing and loading share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from longrecall.models.checkpoint import CheckpointWriter
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

GLA = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 6}
MAMBA2 = {"type": "mamba2", "inner_dim": 16, "head_dim": 4, "state_dim": 3}
HANDOVER = {"type": "handover", "old": MAMBA2, "new": {**MAMBA2, "state_dim": 5}}
RECORD = {
    "method": "grow_state",
    "init": "preserve",
    "layers": [1],
    "seed": 0,
    "longrecall_version": "0.1.0",
    "touched": ["model.layers.1.mixer.in_proj.weight"],
    "state_size": {"before": 48, "after": 96},
}


def config_of(*mixers: dict[str, Any], tied: bool = False) -> RecurrentConfig:
    layers = [{"mixer": mixer, "mlp_size": 8 if mixer["type"] == "gla" else 0} for mixer in mixers or (GLA, MAMBA2)]
    return RecurrentConfig(vocab_size=17, hidden_size=8, layers=layers, tie_word_embeddings=tied)


def model_of(*mixers: dict[str, Any], tied: bool = False) -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(config_of(*mixers, tied=tied)).eval()


def logits(model: RecurrentLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(1, -1)).logits


def filled(config: RecurrentConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `config`, with numbers of its own."""
    for index, (name, shape) in enumerate(config.tensor_shapes().items()):
        yield name, torch.full(shape, float(index))


def write(out: Path, config: RecurrentConfig, **options: Any) -> None:
    with CheckpointWriter(out, **options) as writer:
        writer.set_config(config)
        for name, tensor in filled(config):
            writer.add(name, tensor)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
