"""The benchmark of quantised weights runs through on a small model, and every row is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchao.quantization")

import gpu_quantised


def test_every_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_quantised.py", "--tiny", "--out", str(out)])
    gpu_quantised.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 2 + 3 * 3 + 2
    assert not [row for row in rows if "error" in row]
    # In plain torch both ways: the differences of bfloat16 products of other shapes.
    assert all(row.get("off", 0) < 0.1 for row in rows)
