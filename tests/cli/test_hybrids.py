"""The verbs on hybrids, one after the other as a user has them: layers of every kind, none of them is in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import longrecall
from longrecall.cli.main import main
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from tests.hybrids import HYBRIDS, WIDTH, save_hybrid

TEXT = "\f".join(f"Story {i}. " + f"The {i}th fox met a dog.\n" * (30 + i) for i in range(6))


def command(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def test_a_hybrid_goes_through_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of one module each, some of them without any state."""
    name = "nemotron"
    described, model, text = tmp_path / "model.json", tmp_path / "model", tmp_path / "text.txt"
    described.write_text(json.dumps({"vocab_size": 258, "hidden_size": WIDTH, **HYBRIDS[name]}))
    text.write_text(TEXT)
    command("init", described, tmp_path / "fresh", "--tokenizer", "bytes")
    assert longrecall.load(tmp_path / "fresh").config.layers == save_and_load(name, model).config.layers
    recall = ("--tasks", "phonebook,bits_per_byte", "--lengths", 64, "--samples", 2, "--pairs", 2, "--text", text)
    command("eval", model, *recall, "--out", tmp_path / "before.json")
    recipe: dict[str, Any] = {
        "model": {"checkpoint": str(model)},
        "data": {"context_length": 48, "sources": [{"kind": "text", "path": str(text)}]},
        "initial_state": {"kind": "state_passing"},
        "run": {"output": str(tmp_path / "run"), "steps": 1, "batch_size": 2, "report_to": "none"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command("train", tmp_path / "recipe.yaml", "--dry-run")
    command("train", tmp_path / "recipe.yaml")
    trained = tmp_path / "run" / "final"
    command("eval", trained, *recall, "--out", tmp_path / "after.json")
    command("compare", tmp_path / "before.json", tmp_path / "after.json")
    diagnosis = tmp_path / "diagnosis.json"
    few = ("--multiple", 4, "--sequences", 2, "--parts", "perplexity,state", "--training-length", 16)
    command("diagnose", trained, "--text", text, *few, "--out", diagnosis)
    layers = json.loads(diagnosis.read_text())["state"]["layers"]
    assert [(entry["layer"], entry["mixer"]) for entry in layers] == [(0, "mamba2"), (2, "mamba2")]
    results = (tmp_path / "before.json", tmp_path / "after.json", diagnosis, tmp_path / "run" / "training.json")
    command("report", *results, "-o", tmp_path / "report.html")
    command("info", trained, "--backends")
    capsys.readouterr()


def save_and_load(name: str, folder: Path) -> Any:
    return longrecall.load(save_hybrid(name, folder))


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_on_disk_go_on_as_if_the_text_had_been_read_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, state = save_hybrid(name, tmp_path / "model"), tmp_path / "state.safetensors"
    command("generate", model, "--prompt", "Once upon a time", "--save-state", state)
    capsys.readouterr()
    loaded, tokenizer = longrecall.load(model), load_tokenizer(model, 258)
    asked = {"max_new_tokens": 5, "eos_token_id": None}
    whole = tokenizer("Once upon a time there", return_tensors="pt").input_ids
    rest = tokenizer(" there", return_tensors="pt", add_special_tokens=False).input_ids
    read = longrecall.RecurrentState.load(state, loaded)
    mask = torch.ones(1, read.length + rest.shape[1])
    for how in ({"do_sample": False}, {"num_beams": 3}):
        expected = loaded.generate(whole, **asked, **how)[0, whole.shape[1] :]
        found = loaded.generate(rest, past_key_values=read, attention_mask=mask, **asked, **how)
        assert torch.equal(found[0, rest.shape[1] :], expected), how
    command("generate", model, "--load-state", state, "--prompt", " there", "--max-new-tokens", 5, "--json")
    said = json.loads(capsys.readouterr().out)
    greedy = loaded.generate(whole, max_new_tokens=5, do_sample=False)[0, whole.shape[1] :]
    assert said["text"].endswith(tokenizer.decode(greedy, skip_special_tokens=True))
