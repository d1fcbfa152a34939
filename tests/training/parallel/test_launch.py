"""Runs as users start them: torchrun and accelerate launch, good and bad, each with one line or one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from longrecall.training.recipe import Recipe
from tests.processes import PATIENCE

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longrecall.cli.main")
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "-m", "longrecall.cli.main")
CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "RecurrentLayer",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "machine_rank": 0,
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": True,
}


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # An entry for the working folder alone would be looked up in another one.
    paths = [os.path.abspath(path) for path in sys.path if path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture
def folder(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """A recipe of two steps, and Accelerate's config file."""
    recipe = make_recipe("run.steps=2", "optimizer.warmup=1", "run.output=out").to_dict()
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def test_good_launches(folder: Path) -> None:
    """The same numbers whoever starts the processes; the table is printed once."""
    losses = []
    for output, words, parallel in (
        ("a", TORCHRUN, ("--set", "parallel.shard=2")),
        ("b", ACCELERATE, ()),
        ("c", TORCHRUN, ()),
    ):
        done = start(folder, *words, "train", "r.yaml", "--set", f"run.output={output}", *parallel)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("wrote ") == 1
        assert "FutureWarning" not in done.stderr
        result = json.loads((folder / output / "training.json").read_text())
        assert result["recipe"]["parallel"]["shard"] == (1 if output == "c" else 2)
        losses.append([row["loss"] for row in result["log"]])
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "change", "line"),
    [
        (TORCHRUN, ("--set", "parallel.shard=3"), "shard 3 x context 1 = 3, which does not divide the 2 processes"),
        (TORCHRUN, ("--set", "parallel.shards=3"), "shards"),
        (TORCHRUN, ("--set", "model.checkpoint=nowhere"), "nowhere"),
        (ACCELERATE, ("--set", "parallel.context=2"), "accelerate launch asks for shard 2 x context 1, but the recipe"),
    ],
    ids=["mesh", "key", "checkpoint", "accelerate"],
)
def test_bad_launches(folder: Path, words: tuple[str, ...], change: tuple[str, ...], line: str) -> None:
    done = start(folder, *words, "train", "r.yaml", *change)
    assert done.returncode != 0
    said = [text for text in done.stderr.splitlines() if "longrecall: error:" in text]
    assert len(said) == 1, done.stderr[-3000:]
    assert line in said[0]
    assert "exitcode  : 2" in done.stderr
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())


def test_the_benchmark(tmp_path: Path) -> None:
    """Its rows are those of real launches; a GPU run only takes larger models."""
    script = Path(__file__).parents[3] / "benchmarks" / "gpu_parallel.py"
    words = ("--tiny", "--gpus", "2", "--warmup", "1", "--steps", "2", "--out", "b.json", "--only", "FSDP2")
    done = start(tmp_path, str(script), *words)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["tokens_per_second"] > 0
    assert row["losses"][1] < row["losses"][0]
