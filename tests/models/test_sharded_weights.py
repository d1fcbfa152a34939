"""FSDP2 with real processes: sharded models compute what whole ones do, generate text, and say what they cannot do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests import warm
from tests.models import sharding_worker
from tests.processes import PATIENCE, meeting_point

WORKER = [sys.executable, "-W", "ignore", "-m", "tests.models.sharding_worker"]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


@pytest.mark.long
def test_two_processes_compute_what_one_does() -> None:
    """Losses, gradients, a step of AdamW, states, text: see the worker."""
    done = warm.run(sharding_worker.on_cpu)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_gpus_compute_what_one_does(count: int) -> None:
    """One GPU too: its weights are DTensors, and freed between two uses, as they are on many."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        store = meeting_point()
        shared = environment(WORLD_SIZE=str(count))
    started = [
        subprocess.Popen([*WORKER, "cuda"], env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
                         stderr=subprocess.STDOUT)
        for rank in range(count)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
        del store
    assert not any(process.returncode for process in started), "\n".join(said)
