"""The CPU benchmark runs, its memory is linear in the length, and we are as much faster than the peer as promised."""

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
    out = tmp_path_factory.mktemp("cpu_ops") / "result.json"
    # In a process of its own: the tests' has one thread.
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu_ops.py"), "--threads", "2", "--repeats", "5"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])}
    subprocess.run([*command, "--out", str(out)], check=True, env=env, timeout=280)
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("op", "least"), [("gated delta rule", 2.4), ("Mamba-2 scan, 1 group", 4.0)])
def test_faster_than_the_peer_by_the_promised_factor(result: dict, op: str, least: float) -> None:
    row = next(row for row in result["results"] if row["op"] == op)
    assert row["forward_backward"]["ratio"] >= least


@pytest.mark.slow
def test_forward_memory_grows_linearly(result: dict) -> None:
    for row in result["results"]:
        short, middle, long = (row["forward_memory_mib"][length] for length in ("2048", "4096", "8192"))
        # From 4096 to 8192 twice what came from 2048 to 4096 if linear, four times that if quadratic. The rest, 32 MiB,
        # is for what the allocator rounds up.
        assert long - middle < 2.5 * max(middle - short, 0) + 32, row
