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

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.training.recipe import Recipe
from tests.processes import PATIENCE
from tests.test_ecosystem_page import blocks
from tests.training.conftest import tiny_model

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longrecall.cli.main")
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file")
ACCELERATE = (*LAUNCH, "accelerate.yaml", "-m", "longrecall.cli.main")
COPIES = (*LAUNCH, "copies.yaml", "-m", "longrecall.cli.main")
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

"""What shards the weights over two processes on CPUs."""
ON_CPUS = {key: value for key, value in CONFIG.items() if key != "fsdp_config"} | {"distributed_type": "MULTI_GPU"}
"""Two copies; "MULTI_CPU" would leave the processes to mpirun."""


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # An entry for the working folder alone would be looked up in another one.
    paths = [os.path.abspath(path) for path in sys.path if path]
    # Accelerate does not tell several processes that its config file wants CPUs.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
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
    (tmp_path / "copies.yaml").write_text(yaml.safe_dump(ON_CPUS))
    (tmp_path / "single.yaml").write_text(yaml.safe_dump(ON_CPUS | {"distributed_type": "MULTI_CPU"}))
    return tmp_path


def test_good_launches(folder: Path) -> None:
    """The same numbers whoever starts the processes; the table is printed once."""
    losses = []
    for output, words, parallel in (
        ("a", TORCHRUN, ("--set", "parallel.shard=2")),
        ("b", ACCELERATE, ()),
        ("c", TORCHRUN, ()),
        ("d", COPIES, ()),
    ):
        done = start(folder, *words, "train", "r.yaml", "--set", f"run.output={output}", *parallel)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("wrote ") == 1
        assert "on 2 processes" in done.stdout and "FutureWarning" not in done.stderr
        result = json.loads((folder / output / "training.json").read_text())
        assert result["recipe"]["parallel"]["shard"] == (1 if output in "cd" else 2)
        losses.append([row["loss"] for row in result["log"]])
    assert losses[0] == losses[1] and losses[2] == losses[3]
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


def test_accelerate_without_mpirun_starts_one_process(folder: Path) -> None:
    """Two were asked for: one line instead of half a run."""
    done = start(folder, *LAUNCH, "single.yaml", "-m", "longrecall.cli.main", "train", "r.yaml")
    assert done.returncode != 0
    (line,) = [text for text in done.stderr.splitlines() if "longrecall: error:" in text]
    assert "num_processes is above 1, but a single process was started" in line
    assert not (folder / "out").exists()


ASKED = """
found = [None] * torch.distributed.get_world_size()
torch.distributed.all_gather_object(found, sum(float(p.double().abs().sum()) for p in trainer.model.parameters()))
print("took part:", trainer.accelerator.num_processes, len(found), len(set(found)))
"""
"""Said by every process after training: how many there are, and how many different models they have."""


def test_a_script_with_the_trainer(folder: Path) -> None:
    """The page's own: accelerate launch starts it on two processes, which end with one model."""
    tiny_model().save_pretrained(folder / "CKPT")
    byte_tokenizer().save_pretrained(str(folder / "CKPT"))
    (folder / "text.txt").write_text("The name of the river is Aare.\n" * 8)
    load, train = blocks("python")[0], next(block for block in blocks("python") if "trainer.train()" in block)
    script = load + train.replace("max_steps=4", "max_steps=4, use_cpu=True") + ASKED
    (folder / "script.py").write_text(script)
    done = start(folder, *LAUNCH, "copies.yaml", "script.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("took part: 2 2 1") == 2, done.stdout
    assert (folder / "run" / "model" / "model.safetensors").exists()


def test_the_benchmark(tmp_path: Path) -> None:
    """Its rows are those of real launches; a GPU run only takes larger models."""
    script = Path(__file__).parents[3] / "benchmarks" / "gpu_parallel.py"
    words = ("--tiny", "--gpus", "2", "--warmup", "1", "--steps", "2", "--out", "b.json", "--only", "FSDP2")
    done = start(tmp_path, str(script), *words)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["tokens_per_second"] > 0
    assert row["losses"][1] < row["losses"][0]
