"""The benchmark of plain calls runs through on a small model, and every row is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_calls
import pytest
import torch


def test_every_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_calls.py", "--tiny", "--out", str(out)])
    monkeypatch.setattr(gpu_calls.os, "cpu_count", lambda: 1)
    threads = torch.get_num_threads()
    gpu_calls.main()
    torch.set_num_threads(threads)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 11
    assert all(row["tokens_per_second"] > 0 and "error" not in row for row in rows), rows
