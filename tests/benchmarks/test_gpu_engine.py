"""The benchmark of the engine runs, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_engine


def test_it_compares_and_counts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    gpu_engine.main(["--tiny", "--out", str(out)])
    first, longest, left = json.loads(out.read_text())["rows"]
    assert first["requests"] == longest["requests"] == 12 and first["ratio"] > 0 and left["requests"] == 40
    assert (first["order"], longest["order"]) == ("arrival", "longest")
