"""The benchmark of the interventions runs, and state passing costs no more than promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("initial_states") / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "initial_states.py"), "--repeats", "11", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])}
    subprocess.run(command, check=True, env=env, timeout=280)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_state_passing_keeps_95_percent_of_the_throughput(result: dict) -> None:
    found = {row["model"]: row["throughput"] for row in result["results"] if row["kind"] == "state_passing"}
    assert len(found) == 2
    assert all(ratio >= 0.95 for ratio in found.values()), found


@pytest.mark.slow
def test_frozen_weights_train_faster(result: dict) -> None:
    """No gradient of a weight is formed; were freezing forgotten, the ratio would be that of a learned state."""
    assert all(row["throughput"] > 1.1 for row in result["results"] if row["kind"] == "learned, freeze true")
