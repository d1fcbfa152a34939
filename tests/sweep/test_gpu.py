from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.cli.main import main
from longrecall.sweep.examples import Cells
from longrecall.sweep.grid import RunSpec, runs_of
from longrecall.sweep.mixers import DEFAULTS
from longrecall.sweep.recipe import SweepRecipe
from longrecall.sweep.scheduler import train_all
from longrecall.sweep.training import ModelRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MakeSpec = Callable[..., RunSpec]


def trained(spec: RunSpec, device: torch.device) -> ModelRun:
    run = ModelRun(spec, *Cells(device).of(spec), device)
    for _ in run.work():
        pass
    return run


def test_a_recorded_run_is_the_eager_one(make_spec: MakeSpec) -> None:
    spec = make_spec("training.clip=1.0", "training.epochs=4", "models.mlp=8", "training.schedule_unit=epoch")
    gpu, cpu = trained(spec, GPU), trained(spec, CPU)
    for (name, ours), theirs in zip(gpu.predictor.named_parameters(), cpu.predictor.parameters(), strict=True):
        # Twelve steps in float32, whose sums a GPU orders in another way; AdamW magnifies what is tiny.
        torch.testing.assert_close(
            ours.cpu(), theirs, rtol=1e-2, atol=1e-4, msg=lambda text, name=name: f"{name} {text}"
        )
    losses = [entry[1] for entry in gpu.history]
    assert losses == pytest.approx([entry[1] for entry in cpu.history], rel=1e-3)
    assert gpu.row()["seconds"] > 0


def test_dropout_goes_on_from_step_to_step_and_repeats_with_the_seed(make_spec: MakeSpec) -> None:
    words = ("training.dropout=0.5", "training.learning_rates=[1e-12]", "training.shuffle=false")
    spec = make_spec(*words, "data.train=8", "training.epochs=6", "training.schedule=constant")
    first, second = trained(spec, GPU), trained(spec, GPU)
    # The same batch and the same weights in every step: only the dropout tells the losses apart.
    assert len({entry[1] for entry in first.history}) == 6
    assert [entry[1] for entry in first.history] == pytest.approx([entry[1] for entry in second.history], rel=1e-4)
    other = trained(make_spec(*words, "data.train=8", "training.epochs=6", "data.seed=0", "training.dropout=0"), GPU)
    # rel 1e-6: the rate of 1e-12 leaves float32 weights as they are.
    assert [entry[1] for entry in other.history] == pytest.approx([other.history[0][1]] * 6, rel=1e-6)


@pytest.mark.parametrize(("precision", "processes"), [("fp32", 1), ("bf16", 1), ("fp32", 2)])
def test_side_by_side_is_one_by_one(tiny: dict[str, Any], precision: str, processes: int) -> None:
    overrides = ["training.seeds=[0,1,2]", "training.epochs=5", f"training.precision={precision}"]
    specs = runs_of(SweepRecipe.from_dict(tiny, overrides))
    one: list[dict[str, Any]] = []
    many: list[dict[str, Any]] = []
    assert train_all(specs, GPU, 1, None, one.append)
    assert train_all(specs, GPU, 5, None, many.append, processes)
    found = {row["key"]: row for row in many}
    assert len(found) == len(one) == 12
    for row in one:
        mine, theirs = ([entry[1] for entry in rows["history"]] for rows in (found[row["key"]], row))
        assert found[row["key"]]["status"] == "done"
        # Atomic sums have no fixed order; fifteen steps of AdamW let that grow, under bf16 by its 8 bits.
        assert mine == pytest.approx(theirs, rel=2e-2 if precision == "bf16" else 1e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_tensor_float_32_trains_almost_the_same(tiny: dict[str, Any], processes: int) -> None:
    tiny["models"] |= {"hidden_sizes": [64], "layers": 2}
    specs = runs_of(SweepRecipe.from_dict(tiny, ["training.epochs=5"]))
    found: dict[str, list[dict[str, Any]]] = {"highest": [], "high": []}
    for precision, rows in found.items():
        assert train_all(specs, GPU, 2, None, rows.append, processes, matmul_precision=precision)
        assert {row["matmul_precision"] for row in rows} == {precision}
        rows.sort(key=lambda row: str(row["key"]))
    for full, coarse in zip(*found.values(), strict=True):
        # Factors of ten bits: nearly equal at first; fifteen steps of AdamW, which divides by the gradient's size,
        # then let that grow (to .054 on an H200).
        losses = [[entry[1] for entry in row["history"]] for row in (coarse, full)]
        assert losses[0][0] == pytest.approx(losses[1][0], rel=5e-3)
        assert losses[0] == pytest.approx(losses[1], rel=0.15)


@pytest.mark.parametrize("retrieval", [False, True])
@pytest.mark.parametrize("mixer", DEFAULTS)
def test_every_mixer_can_be_recorded(tiny: dict[str, Any], mixer: str, retrieval: bool) -> None:
    tiny["models"] |= {"mixers": [mixer], "hidden_sizes": [32], "layers": 2}
    if retrieval:
        tiny["models"]["retrieval"] = {"layer": 0, "chunk": 2, "top_k": 1, "encoder_dim": "width", "head_dim": 32}
    tiny["tasks"][0]["settings"] = {"vocab_size": 64, "length": 64, "pairs": 4}
    spec = runs_of(SweepRecipe.from_dict(tiny))[0]
    gpu, cpu = trained(spec, GPU), trained(spec, CPU)
    # Loss of an untrained model over six steps; 1e-2 tells a wrong recording from other orders of sums.
    assert [e[1] for e in gpu.history] == pytest.approx([e[1] for e in cpu.history], rel=1e-2)


def test_pooled_sets_can_be_recorded_and_go_on(tiny: dict[str, Any], tmp_path: Path) -> None:
    """A recording for each length; a second run begins where the first one was written, in the middle of an epoch."""
    sets = {"train": [{"length": 8, "pairs": 2}, {"length": 12, "pairs": 3}], "test": [{"length": 16, "pairs": 4}]}
    tiny["tasks"] = [{"name": "mqar", "settings": {"vocab_size": 16}, **sets}]
    tiny["models"] |= {"norm": "layer", "second_norm": True}
    tiny["training"] |= {"epochs": 4, "dropout": 0.1, "schedule": "constant"}
    spec = runs_of(SweepRecipe.from_dict(tiny))[0]
    gpu, cpu = trained(spec, GPU), trained(spec, CPU)
    first = ModelRun(spec, *Cells(GPU).of(spec), GPU)
    work = first.work()
    while first.step < 9 or first.evaluating:
        next(work)
    first.save(tmp_path / "x.pt")
    again = ModelRun(spec, *Cells(GPU).of(spec), GPU)
    again.load(tmp_path / "x.pt")
    for _ in again.work():
        pass
    losses = [[entry[1] for entry in run.history] for run in (gpu, cpu, again)]
    # The CPU draws another dropout; the GPU's sums have no fixed order.
    assert losses[0] == pytest.approx(losses[1], rel=5e-2)
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_compression_can_be_recorded(make_spec: MakeSpec) -> None:
    spec = make_spec("tasks.0.name=mad_compression", "tasks.0.settings={vocab_size: 16, length: 8}")
    gpu, cpu = trained(spec, GPU), trained(spec, CPU)
    assert [e[1] for e in gpu.history] == pytest.approx([e[1] for e in cpu.history], rel=1e-2)


def test_the_command_on_a_gpu(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write()
    assert main(["sweep", str(recipe), "--set", "run.device=cuda", "--set", "run.parallel=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 4


def test_small_models_learn_side_by_side(tiny: dict[str, Any]) -> None:
    """Retrieval solves MQAR, which proves that recorded steps learn and not only run."""
    tiny["models"]["retrieval"] = {"layer": 0, "chunk": 2, "top_k": 1, "encoder_dim": "width", "head_dim": 32}
    tiny["models"] |= {"hidden_sizes": [32], "layers": 2}
    tiny["tasks"][0]["settings"] = {"vocab_size": 128, "length": 32, "pairs": 4}
    tiny["training"] |= {"epochs": 12, "batch_size": 64, "learning_rates": [0.01], "stop_at": 0.98}
    tiny["data"] = {"train": 2048, "test": 256}
    rows: list[dict[str, Any]] = []
    assert train_all(runs_of(SweepRecipe.from_dict(tiny)), GPU, 2, None, rows.append)
    assert all(row["accuracy"] >= 0.98 for row in rows), rows
