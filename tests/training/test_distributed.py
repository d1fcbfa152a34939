"""Data parallelism with two real processes (gloo, CPU): one gradient, own shards, own states, exact resume."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import longrecall
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import open_checkpoint
from longrecall.training.checkpoints import find_saved_runs
from longrecall.training.data import BatchStream
from longrecall.training.initial_states import make_initial_state
from longrecall.training.optimizer import make_optimizer, parameter_groups, touched_names
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe
from longrecall.training.schedule import rate_factor

WORKER = """
import sys
import torch
from longrecall.training.data import BatchStream
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe

torch.set_num_threads(1)
path, folder = sys.argv[1:]
run_recipe(Recipe.load(path, [f"run.output={folder}/whole"]), show_progress=False)

class Killed(BaseException):
    pass

original = BatchStream.__iter__
def dying(self):
    for index, batch in enumerate(original(self)):
        if index == 7:
            raise Killed
        yield batch

BatchStream.__iter__ = dying
try:
    run_recipe(Recipe.load(path, [f"run.output={folder}/killed"]), show_progress=False)
except Killed:
    pass
BatchStream.__iter__ = original
summary = run_recipe(Recipe.load(path, [f"run.output={folder}/killed"]), resume=True, show_progress=False)
assert summary.resumed_from == 3, summary
torch.distributed.destroy_process_group()
"""


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def reference(recipe: Recipe) -> list[float]:
    """The same training in one process: two streams, two carried states, one gradient over all labels."""
    source = open_checkpoint(recipe.model.checkpoint)
    model = longrecall.load(recipe.model.checkpoint, dtype="float32").train()
    groups = parameter_groups([n for n, _ in model.named_parameters()], touched_names(source.surgery), recipe.optimizer)
    optimizer = make_optimizer(model, groups, recipe.optimizer)
    streams = [BatchStream(recipe.data, byte_tokenizer(), recipe.run.batch_size, rank, 2) for rank in range(2)]
    states = [make_initial_state(recipe.initial_state, model, recipe.run.seed, rank) for rank in range(2)]
    found = []
    for step in range(recipe.steps(2)):
        total, labels = torch.zeros(()), 0
        for stream, initial in zip(streams, states, strict=True):
            for _ in range(recipe.run.gradient_accumulation):
                batch = stream.next_batch()
                out = model(
                    batch["input_ids"],
                    labels=batch["labels"],
                    past_key_values=initial.before_batch(torch.ones(3, dtype=torch.bool)),
                )
                initial.after_batch(out.past_key_values)
                count = int((batch["labels"][:, 1:] != -100).sum())
                total, labels = total + out.loss * count, labels + count
        (total / labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        for group, mine in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = mine.learning_rate * rate_factor(step, recipe.steps(2), recipe.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / labels).item())
    return found


def test_two_processes(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe("run.save_every=3")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(tmp_path / "r.yaml"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    whole = losses(tmp_path / "whole")
    # float32 sums over two processes and micro-batches in another order, grown over six steps of AdamW.
    assert whole == pytest.approx(reference(recipe), rel=1e-4)
    assert losses(tmp_path / "killed") == whole
    assert [saved.step for saved in find_saved_runs(tmp_path / "whole")] == [3, 6]
    saved = find_saved_runs(tmp_path / "whole")[-1]
    first, second = saved.process(0), saved.process(1)
    assert first.data["position"] != second.data["position"]
    carried = "initial_state.carried.0.recurrent"
    assert first.tensors[carried].shape == second.tensors[carried].shape
    assert not torch.equal(first.tensors[carried], second.tensors[carried])
    with pytest.raises(UserError, match="was saved by 2 processes and cannot go on with 1"):
        run_recipe(Recipe.from_dict(recipe.to_dict(), [f"run.output={tmp_path / 'whole'}"]), resume=True)
