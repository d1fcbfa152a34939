"""The small models of bytes that the experiments train: Mamba-2 and GLA of a few hundred thousand parameters."""

from __future__ import annotations

from typing import Any

import torch

from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM


def mamba2(state_dim: int, groups: int = 1, width: int = 160, layers: int = 3) -> dict[str, Any]:
    """Twice the width inside, in heads of 64."""
    mixer = {"type": "mamba2", "inner_dim": 2 * width, "head_dim": 64, "state_dim": state_dim, "groups": groups}
    return {"hidden_size": width, "layers": [{"mixer": mixer}] * layers}


def gla(key_dim: int, divisor: float = 16.0) -> dict[str, Any]:
    """128 wide, 3 layers, 4 heads; a fresh gate keeps half of the state for `divisor` tokens."""
    mixer = {"type": "gla", "num_heads": 4, "key_dim": key_dim, "value_dim": 32, "conv_width": 4}
    return {"hidden_size": 128, "layers": [{"mixer": mixer | {"gate_divisor": divisor}, "mlp_size": 320}] * 3}


def build(description: dict[str, Any], length: int, seed: int, device: str | torch.device = "cpu") -> RecurrentLM:
    """A model of bytes (256 the end, 257 the padding) with the weights of `seed`, made for rows of `length` tokens."""
    torch.manual_seed(seed)
    config = RecurrentConfig(context_length=length, bos_token_id=256, eos_token_id=256, pad_token_id=257, **description)
    return RecurrentLM(config).to(device)
