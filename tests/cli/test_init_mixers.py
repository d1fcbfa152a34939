"""Descriptions with Mamba, RWKV-5 and RWKV-6 layers through the CLI: init, info and generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.models.accounting import account
from longrecall.models.loading import load

# Numbers of the recurrent state: 3 * 20; 2 * 5 * 6 in both RWKVs.
MIXERS: dict[str, tuple[dict[str, Any], int]] = {
    "mamba": ({"inner_dim": 20, "state_dim": 3, "dt_rank": 2}, 60),
    "rwkv5": ({"input_dim": 12, "num_heads": 2, "key_dim": 5, "value_dim": 6}, 60),
    "rwkv6": ({"input_dim": 12, "num_heads": 2, "key_dim": 5, "value_dim": 6, "mix_rank": 3}, 60),
}


def describe(folder: Path, kind: str, hidden_size: int = 12) -> Path:
    layer = {"repeat": 2, "mixer": {"type": kind, **MIXERS[kind][0]}, "mlp_size": 16}
    path = folder / "model.json"
    path.write_text(json.dumps({"vocab_size": 258, "hidden_size": hidden_size, "layers": [layer]}))
    return path


@pytest.mark.parametrize("kind", MIXERS)
def test_a_described_model_is_made_counted_and_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert main(["init", str(describe(tmp_path, kind)), str(folder)]) == 0
    capsys.readouterr()
    assert main(["info", str(folder)]) == 0
    said = capsys.readouterr().out
    assert kind in said
    model = load(folder)
    counted = account(model.config)
    assert counted.state_size == 2 * MIXERS[kind][1]
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert f"{counted.parameters:,}" in said
    assert main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "2"]) == 0


def test_an_input_of_another_width_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(describe(tmp_path, "rwkv5", hidden_size=16)), str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "input_dim (12) must be the hidden_size of the model (16)" in said[0]
    assert not (tmp_path / "made").exists()
