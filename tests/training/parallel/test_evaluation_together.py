"""Evaluation while two processes train one model: the numbers, the best model and the learned state of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from tests import warm
from tests.conftest import MIXERS
from tests.models.test_memory_tokens import MEMORY, MODELS
from tests.training.conftest import MAMBA, tiny_model
from tests.training.parallel import evaluating
from tests.training.parallel.test_equal_to_one_process import write_case
from tests.training.runs import weights

FEW = {"steps": 2, "gradient_accumulation": 1}
CASES: dict[str, dict[str, Any]] = {
    "shards": {"parallel": {"shard": 2}},
    "pieces": {"parallel": {"context": 2}, "model": "plain"},
    "state": {"parallel": {"shard": 2}, "model": "memory", "initial_state": {"kind": "learned", "freeze": False}},
    "large": {"parallel": {"shard": 2}, "model": "large"},
}
"""Name -> what the recipe of two processes says beside the usual; models as `write_models` calls them."""


def write_models(place: Path) -> None:
    save(tiny_model(MIXERS["attention"], MIXERS["gated_delta_net"]), place / "base", byte_tokenizer())
    save(tiny_model(), place / "plain", byte_tokenizer())
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 20, "layers": MODELS["outside_of_hymba"], "memory_tokens": MEMORY}
    save(RecurrentLM(RecurrentConfig(**sizes)), place / "memory", byte_tokenizer())
    layers = [{"mixer": {**MAMBA, "inner_dim": 128, "head_dim": 32}, "mlp_size": 512} for _ in range(12)]
    large = RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=128, layers=layers))
    save(large, place / "large", byte_tokenizer())


def numbers(output: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{"step": row["step"]} | row["evaluation"] for row in rows if "evaluation" in row]


def test_two_processes_measure_what_one_does(tmp_path: Path, text: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    write_models(models)
    held_out = {"sources": [{"kind": "text", "path": str(text)}], "tokens": 150, "batch_size": 2}
    tasks = [
        {"kind": "passkey", "lengths": [160], "samples": 3, "options": {"depths": [0.5]}},
        {"kind": "bits_per_byte", "lengths": [64], "samples": 2, "text": str(text)},
    ]
    for name, case in CASES.items():
        asked = {"every": 2, "at_start": name != "large", "best": True, "held_out": held_out}
        asked |= {"tasks": tasks} if name in ("shards", "pieces") else {}
        own = {"evaluation": asked, "run": FEW, **case}
        write_case(tmp_path / name, models / own.pop("model", "base"), text, 2, own)
    done = warm.run(evaluating.main, *(str(tmp_path / name) for name in CASES))
    assert done.returncode == 0, done.stderr[-12000:]
    for name in ("shards", "pieces", "state"):
        alone = yaml.safe_load((tmp_path / name / "r.yaml").read_text())
        alone["run"] |= {"output": str(tmp_path / name / "alone")}
        alone["run"]["batch_size"] *= 2 // alone.pop("parallel").get("context", 1)
        run_recipe(Recipe.from_dict(alone), show_progress=False)
        compare(tmp_path / name / "out", tmp_path / name / "alone", name)
    close(*(load_file(tmp_path / "state" / place / "initial_state.safetensors") for place in ("out", "alone")))
    # No process ever holds the model: as for `consolidate`, a few of its largest tensors.
    model = open_checkpoint(tmp_path / "large" / "out" / "best")
    largest = max(model.read(name).nbytes for name in model.names())
    assert sum(model.read(name).nbytes for name in model.names()) > 36 * largest
    for rank in range(2):
        (grown,) = json.loads((tmp_path / "large" / "out" / f"grown-{rank}.json").read_text())
        assert grown < 14 * largest, rank


def compare(found: Path, wanted: Path, name: str) -> None:
    own, others = numbers(found), numbers(wanted)
    assert [row["step"] for row in own] == [0, 2], name
    for one, other in zip(own, others, strict=True):
        # float32 sums in another order; what a task counts does not change by it.
        del one["seconds"], other["seconds"]
        assert one == pytest.approx(other, rel=1e-5), name
    both = [json.loads((place / "training.json").read_text())["evaluation"]["best"] for place in (found, wanted)]
    assert both[0]["step"] == both[1]["step"] > 0
    close(weights(found / "best"), weights(wanted / "best"))
    assert not list(found.glob(".*"))


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Up to the order of float sums: 1e-5 of the largest number of a tensor."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        error = (found[key] - tensor).double().abs()
        assert not error.numel() or error.max() <= 1e-5 * tensor.double().abs().max(), key
