"""Models made to have one illness each, and the shipped base models, which have none of those."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longrecall
from longrecall import RecurrentConfig, RecurrentLM, RecurrentState
from longrecall.models.byte_tokenizer import byte_tokenizer

ASSETS = Path(longrecall.__file__).parent / "assets"
HELD_OUT = ASSETS / "text" / "held_out.txt"
QUESTION = re.compile(rb"What is the pass key\? The pass key is ([0-9]{0,4})")
NEEDLE = re.compile(rb"Remember it\. ([0-9]{5}) is the pass key")


def tiny_model(*mixers: dict[str, Any], seed: int = 0, context_length: int | None = 32) -> RecurrentLM:
    """A random float64 model over bytes whose predictions are far from constant."""
    torch.manual_seed(seed)
    layers = [{"mixer": mixer, "mlp_size": 0} for mixer in mixers]
    config = RecurrentConfig(
        vocab_size=258,
        # Some mixers read the residual stream channel by channel and say how wide it is.
        hidden_size=next((mixer[key] for mixer in mixers for key in ("channels", "input_dim") if key in mixer), 16),
        layers=layers,
        tie_word_embeddings=False,
        initializer_range=0.6,
        context_length=context_length,
    )
    return RecurrentLM(config).double().eval()


class Changed(nn.Module):
    """A mixer with something done to its output and state: `change(y, state, position)`, position int64 [B, T]."""

    def __init__(self, mixer: nn.Module, change: Any) -> None:
        super().__init__()
        self.mixer, self.change = mixer, change

    def forward(self, x: Tensor, state: Any, *, mask: Any, position: Tensor) -> Any:
        y, after = self.mixer(x, state, mask=mask, position=position)
        return self.change(y, after, position[:, None] + torch.arange(x.shape[1]))


def change_layer(model: RecurrentLM, layer: int, change: Any) -> RecurrentLM:
    model.model.layers[layer].mixer = Changed(model.model.layers[layer].mixer, change)
    return model


class Ring(nn.Module):
    """Recalls a pass key from the last `keep` bytes; its state has `slots` rows, one random vector for a kept byte.

    With `keep` = `slots` recall ends because the state is full; with `keep` < `slots` it ends while there is room.
    """

    def __init__(self, slots: int, keep: int, context_length: int = 256) -> None:
        super().__init__()
        self.slots, self.keep = slots, keep
        self.device, self.dtype = torch.device("cpu"), torch.float32
        mixer = {"type": "mamba2"}
        size = staticmethod(lambda: slots * slots)
        fields = {"vocab_size": 258, "context_length": context_length, "layers": [{"mixer": mixer}], "state_size": size}
        self.config = type("Config", (), fields)()
        self.codes = torch.randn(8 * slots, slots, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: Tensor, past_key_values: Any, use_cache: bool, logits_to_keep: int = 0) -> Any:
        rows, columns = ids.shape
        state = past_key_values
        old = torch.zeros(rows, 0, dtype=torch.long) if state is None else state.layers[0]["bytes"]
        position = torch.zeros(rows, dtype=torch.long) if state is None else state.position
        seen = torch.cat([old, ids], dim=1)
        logits = torch.zeros(rows, columns, 258)
        for row in range(rows):
            text = bytes((seen[row] % 256).tolist())
            for asked in QUESTION.finditer(text):
                for end in range(asked.start(1), asked.end(1) + 1):
                    needle = NEEDLE.search(text[max(0, end - self.keep) : end])
                    column = end - 1 - old.shape[1]
                    if needle and 0 <= column < columns and end - asked.start(1) < 5:
                        logits[row, column, needle[1][end - asked.start(1)]] = 9.0
        after = position + columns
        memory = torch.zeros(rows, 1, self.slots, self.slots)
        for row in range(rows):
            kept = torch.arange(max(0, int(after[row]) - self.keep), int(after[row]))
            memory[row, 0, kept % self.slots] = self.codes[kept % len(self.codes)]
        kept_bytes = seen[:, -max(self.keep, 64) :]
        new = RecurrentState(({"recurrent": memory, "bytes": kept_bytes},), after, int(after[0]))
        kept_logits = logits[:, -logits_to_keep:] if logits_to_keep else logits
        return type("Output", (), {"logits": kept_logits, "past_key_values": new})()


class FirstTokens(nn.Module):
    """Predicts one and the same byte for ever, decided by the first token that it read."""

    def __init__(self, context_length: int = 64) -> None:
        super().__init__()
        self.device, self.dtype = torch.device("cpu"), torch.float32
        size = staticmethod(lambda: 1)
        layers = [{"mixer": {"type": "gla"}}]
        fields = {"vocab_size": 258, "context_length": context_length, "layers": layers, "state_size": size}
        self.config = type("Config", (), fields)()

    def forward(self, ids: Tensor, past_key_values: Any, use_cache: bool, logits_to_keep: int = 0) -> Any:
        state = past_key_values
        first = ids[:, :1] + 1
        if state is not None:
            old = state.layers[0]["recurrent"][:, 0, 0].long()
            first = torch.where(old > 0, old, first)
        logits = torch.zeros(*ids.shape, 258).scatter(2, (first[:, :, None] - 1).expand(-1, ids.shape[1], 1), 9.0)
        position = ids.shape[1] + (torch.zeros(len(ids), dtype=torch.long) if state is None else state.position)
        new = RecurrentState(({"recurrent": first[:, None, :, None].float()},), position)
        return type("Output", (), {"logits": logits[:, -logits_to_keep:], "past_key_values": new})()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def held_out() -> str:
    return HELD_OUT.read_text(encoding="utf-8")
