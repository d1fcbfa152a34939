"""Data, sharded and hybrid-sharded parallelism on real processes (gloo, CPU): the numbers are those of one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.recipe import Recipe
from tests import warm
from tests.conftest import MIXERS
from tests.layers import test_shared_block
from tests.models.test_memory_tokens import MODELS
from tests.training.conftest import GLA, tiny_model
from tests.training.parallel import one_process, worker

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "copies": (2, {"initial_state": {"kind": "truncated_bptt"}, "leash": {"length": 9, "top_k": 5}}),
    "shards": (
        2,
        {
            "parallel": {"shard": 2},
            "initial_state": {"kind": "learned", "freeze": False},
            "run": {"gradient_checkpointing": True},
            "leash": {"hidden": 0.5},
        },
    ),
    "pieces": (
        2,
        {
            "parallel": {"context": 2},
            "initial_state": {"kind": "truncated_bptt"},
            "run": {"gradient_accumulation": 1},
            "leash": {"length": 20},
        },
    ),
    "both": (4, {"parallel": {"replicate": 2, "shard": 2}}),
}
"""Name -> processes, and what the recipe says beside the usual."""
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "all": (4, {"parallel": {"shard": 2, "context": 2}, "initial_state": {"kind": "learned", "freeze": False}}),
    "copies in pieces": (4, {"parallel": {"replicate": 2, "context": 2}}),
    "memory tokens": (2, {"parallel": {"shard": 2}, "model": {"checkpoint": "memory"}}),
    "memory tokens in pieces": (2, {"parallel": {"context": 2}, "model": {"checkpoint": "memory"}}),
    "handover, tied": (2, {"parallel": {"shard": 2}, "model": {"checkpoint": "handover"}}),
    "borrowed weights": (2, {"parallel": {"shard": 2}, "model": {"checkpoint": "borrowed"}}),
    "state alone": (2, {"parallel": {"shard": 2}, "initial_state": {"kind": "learned", "freeze": True}}),
}
"""The same, for other models and mixtures."""


def write_case(folder: Path, base: Path, text: Path, world: int, case: dict[str, Any]) -> Recipe:
    folder.mkdir()
    (folder / "world").write_text(str(world))
    recipe = {
        "model": {"checkpoint": str(base)},
        "data": {"context_length": 32, "sources": [{"kind": "text", "path": str(text)}]},
        # Rates at which rounding does not grow: AdamW divides a gradient that is rounding alone by itself.
        "optimizer": {"learning_rate": 1e-3, "touched": "3x", "warmup": 2, "epsilon": 1e-6, "clip": 0.5},
        "initial_state": {"kind": "state_passing", "probability": 0.7},
        "parallel": case.get("parallel", {}),
        "run": {
            "output": "out", "steps": 5, "batch_size": 2, "gradient_accumulation": 2, "log_every": 1,
            "report_to": "none",
        } | case.get("run", {}),
    } | {key: value for key, value in case.items() if key not in ("run", "parallel")}  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return Recipe.from_dict(recipe)


def run_worker(*folders: Path, main: Callable[..., None] = worker.main) -> None:
    done = warm.run(main, *map(str, folders))
    assert done.returncode == 0, done.stderr[-12000:]


OWN_TEXT = {"context_length": 32, "sources": [{"kind": "text", "path": "own.txt"}]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "divides": ({"parallel": {"shard": 3}}, "shard 3 x context 1 = 3, which does not divide the 2 processes; start a"),
    "counts": ({"parallel": {"replicate": 2, "shard": 2}}, "= 4 processes, but there are 2; start 4, or leave"),
    "differs": ({}, "optimizer.learning_rate is 0.5 in process 1 and 0.001 in process 0. Start all of them with the"),
    "apart": ({}, "run.output out of process 1 .* is not the folder that process 0 writes to. Give a path on"),
    "older": ({"model": {"checkpoint": "own"}}, r"model.checkpoint model.safetensors of process 1 is not that of proc"),
    "shorter": ({"data": OWN_TEXT}, r"data.sources.0 of process 1 is not that of process 0: give a path on a file"),
    "missing": ({"model": {"checkpoint": "nowhere"}}, "nowhere"),
}
"""Name -> what the recipe says beside the usual, and a part of the line that all processes stop with."""


@pytest.mark.long
def test_equal_to_one_process(tmp_path: Path, text: Path) -> None:
    base = tmp_path / "base"
    save(tiny_model(), base, byte_tokenizer(), [{"method": "m", "touched": ["model.layers.1.mixer.k_proj.weight"]}])
    save(tiny_model(seed=1), tmp_path / "teacher", byte_tokenizer())
    for _, case in CASES.values():
        case.get("leash", {})["teacher"] = str(tmp_path / "teacher")
    recipes = {name: write_case(tmp_path / name, base, text, *case) for name, case in CASES.items()}
    for name, (case, _) in REFUSED.items():
        write_case(tmp_path / name, base, text, 2, case)
    other = yaml.safe_load((tmp_path / "differs" / "r.yaml").read_text())
    other["optimizer"]["learning_rate"] = 0.5
    (tmp_path / "differs" / "r-1.yaml").write_text(yaml.safe_dump(other))
    (tmp_path / "apart" / "rank-1").mkdir()
    # The disk of each machine has the files, and one of them others: the output alone is shared.
    for name in ("older", "shorter"):
        for seed, place in enumerate((tmp_path / name, tmp_path / name / "rank-1")):
            place.mkdir(exist_ok=True)
            save(tiny_model(seed=seed), place / "own", byte_tokenizer())
            (place / "own.txt").write_text(text.read_text()[seed * 400 :])
        (tmp_path / name / "rank-1" / "out").symlink_to(tmp_path / name / "out")
    run_worker(*(tmp_path / name for name in (*REFUSED, *CASES)))
    for name, (world, _) in CASES.items():
        compare(tmp_path / name, one_process.train(recipes[name], world // recipes[name].parallel.context), name)
    for name, (_, line) in REFUSED.items():
        found = [json.loads((tmp_path / name / f"refused-{rank}.json").read_text()) for rank in range(2)]
        # Both have stopped, and the first one alone says why.
        assert [refusal["told_here"] for refusal in found] == [True, False], name
        assert all(re.search(line, refusal["line"]) for refusal in found), found
        left = [path.name for path in (tmp_path / name).glob("out/*")]
        assert not left, f"{name} left {left}"


@pytest.mark.slow
def test_other_models_and_mixtures(tmp_path: Path, text: Path) -> None:
    base = tmp_path / "base"
    save(tiny_model(), base, byte_tokenizer())
    sizes = {"vocab_size": 258, "hidden_size": 20, "layers": MODELS["outside_of_hymba"], "memory_tokens": 3}
    save(RecurrentLM(RecurrentConfig(**sizes)), tmp_path / "memory", byte_tokenizer())
    layers = [{"mixer": MIXERS[name], "mlp_size": 24} for name in ("handover", "gla_conv")]
    config = RecurrentConfig(vocab_size=258, hidden_size=32, layers=layers, tie_word_embeddings=True)
    save(RecurrentLM(config), tmp_path / "handover", byte_tokenizer())
    shared = test_shared_block.config(*(test_shared_block.layer(**own) for own in ({}, {"weights_of": 0})))
    lending = RecurrentConfig.from_dict(shared.to_dict() | {"vocab_size": 258})
    save(RecurrentLM(lending), tmp_path / "borrowed", byte_tokenizer())
    recipes = {}
    for name, (world, case) in MORE.items():
        model = {"model": {"checkpoint": str(tmp_path / case["model"]["checkpoint"])}} if "model" in case else {}
        recipes[name] = write_case(tmp_path / name, base, text, world, case | model)
    run_worker(*(tmp_path / name for name in MORE))
    for name, (world, _) in MORE.items():
        compare(tmp_path / name, one_process.train(recipes[name], world // recipes[name].parallel.context), name)


@pytest.mark.slow
def test_compiled_layers(tmp_path: Path, text: Path) -> None:
    """Every layer is traced: the weights are gathered around what is compiled, once with a state and once without."""
    save(tiny_model(GLA, GLA), tmp_path / "base", byte_tokenizer())
    case = {"parallel": {"shard": 2}, "run": {"compile": True, "gradient_accumulation": 1}}
    recipe = write_case(tmp_path / "compiled", tmp_path / "base", text, 2, case)
    run_worker(tmp_path / "compiled", main=worker.compiled)
    compare(tmp_path / "compiled", one_process.train(recipe, 2), "compiled")
    for rank in range(2):
        assert len((tmp_path / "compiled" / f"compiled-{rank}").read_text()) >= 2


def compare(folder: Path, expected: one_process.Trained, name: str) -> None:
    losses = [json.loads(line)["loss"] for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(expected.losses, rel=1e-5), name
    gradients = torch.load(folder / "gradients.pt")
    assert len(gradients) == len(expected.gradients) == 5
    for step, (found, wanted) in enumerate(zip(gradients, expected.gradients, strict=True)):
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            # float32 sums in another order, relative to the largest number of the tensor.
            error = (found[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)
            assert error < 1e-5, (name, step, key, error)
    context = Recipe.load(folder / "r.yaml").parallel.context
    for rank, state in enumerate(state for state in expected.states for _ in range(context)):
        found = torch.load(folder / f"state-{rank}.pt")
        assert found.keys() == state.keys()
        for key in state.keys() - {"batches"}:  # the one process has counted those of all
            error = (found[key] - state[key]).abs().max() / state[key].abs().max().clamp(min=1e-12)
            assert error < 1e-5, (name, rank, key, error)
