"""Published models by their config.json alone: `info` counts them, and an expansion is planned, without any weights.

The files in tests/models/published/ hold what public material says of each config.json. Factors that no material found
gives (those of Falcon-H1-7B) are left out: they have no part in any count. Zamba2-7B's is spelt as transformers has it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from longrecall.cli.main import main
from longrecall.models.formats import detect
from longrecall.models.formats.stock import stock_layout
from tests.models.round_trip import changed

FOLDER = Path(__file__).parent / "published"

PUBLISHED: dict[str, tuple[float, dict[str, str]]] = {
    # Parameters in billions as their publishers say, and a method with its options that fits the model.
    "bamba_9b": (9.78, {"method": "grow_state"}),
    "falcon_h1_7b_base": (7.59, {"method": "grow_state"}),
    "falcon_mamba_7b": (7.27, {"method": "add_retrieval"}),
    "granite_4_h_small": (32.2, {"method": "grow_state"}),
    # As all tensors of these have: their publishers round to 52, 48 and 7.4.
    "jamba_1_5_mini": (51.57, {"method": "add_retrieval"}),
    "kimi_linear_48b_a3b": (49.12, {"method": "subheads"}),
    "zamba2_7b": (7.357, {"method": "grow_state"}),
    "hymba_1_5b_base": (1.522797824, {"method": "add_retrieval"}),
    "nemotron_3_nano_30b_a3b": (31.6, {"method": "grow_state"}),
    "nemotron_h_8b_base_8k": (8.10, {"method": "grow_state"}),
    "olmo_hybrid_7b": (7.43, {"method": "subheads"}),
    # Of Qwen3.5, whose publishers count vision and prediction of several tokens too, what the text model alone has.
    "qwen3_5_0_8b": (0.7524, {"method": "subheads"}),
    "qwen3_5_27b": (26.9, {"method": "subheads"}),
    "qwen3_next_80b_a3b": (79.7, {"method": "subheads"}),
    "recurrentgemma_2b": (2.683, {"method": "add_retrieval"}),
    "recurrentgemma_9b": (8.58, {"method": "add_retrieval"}),
    "rwkv_4_169m_pile": (0.1693, {"method": "add_retrieval"}),
    "rwkv7_191m_world": (0.191034624, {"method": "add_retrieval"}),
    "rwkv7_2_9b_world": (2.94773504, {"method": "add_retrieval"}),
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON that a verb prints."""
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def counted_by_transformers(config: dict[str, Any]) -> int:
    """Parameters of the stock class, and the corrections of its routers, which it calls buffers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    corrections = (buffer.numel() for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    return sum(parameter.numel() for parameter in model.parameters()) + sum(corrections)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_written_as_it_was(name: str) -> None:
    read = json.loads((FOLDER / f"{name}.json").read_text())
    form = detect(read, name)
    written, _ = stock_layout(form, form.layout(read, name).plain, read)
    assert changed(read, written) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_counted_and_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, expansion = PUBLISHED[name]
    file = FOLDER / f"{name}.json"
    found = printed(capsys, "info", str(file))
    config = json.loads(file.read_text())
    # For some there is no class there; their publishers' figures are exact.
    exact = counted_by_transformers(config) if config["model_type"] in CONFIG_MAPPING_NAMES else round(published * 1e9)
    assert found["parameters"] == exact
    # A tenth of a percent, which is more than rounding to the digits in the table takes.
    assert abs(found["parameters"] / 1e9 - published) <= 0.001 * published
    (tmp_path / "model").mkdir()
    shutil.copy(file, tmp_path / "model" / "config.json")
    assert printed(capsys, "info", str(tmp_path / "model"))["parameters"] == found["parameters"]
    options = [text for key, value in expansion.items() for text in (f"--{key}", value)]
    arguments = ("expand", str(tmp_path / "model"), str(tmp_path / "out"), *options, "--layers", "every:6")
    planned = printed(capsys, *arguments, "--dry-run")
    assert planned["state_before"] == found["state_size"] and planned["parameters_before"] == found["parameters"]
    # Retrieval leaves the state as it is.
    larger = "parameters" if expansion["method"] == "add_retrieval" else "state"
    assert planned[f"{larger}_before"] < planned[f"{larger}_after"]
    assert not (tmp_path / "out").exists()
    # Without --dry-run the weights are missed.
    assert main(list(arguments)) == 2
    assert "has no weights" in capsys.readouterr().err
