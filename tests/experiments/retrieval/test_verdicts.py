"""The tables of the pooled table 11, of the paper's selector and of MAD with four blocks, from small records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.retrieval import verdicts
from longrecall.tasks.published import RESONA_TABLE_11


def row(task: str, settings: dict[str, Any], mixer: str, width: int, value: float, **more: Any) -> dict[str, Any]:
    retrieval = more.pop("retrieval", None)
    model = {"mixer": mixer, "hidden_size": width, "layers": 4, "retrieval": retrieval, "mlp": 0}
    known = {"task": task, "settings": settings, "model": model, "learning_rate": 1e-3, "weight_decay": 0.1, "seed": 0}
    return {**known, "accuracy": value, "mad_accuracy": value / 2, "status": "done", **more}


def test_pooled_cells_stand_beside_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RWKV-4 at d 64: one cell as published, one far below; the better of two rates counts, each set by itself."""
    paper = [RESONA_TABLE_11["rwkv"][place][1] for place in (0, 3)]
    rows = []
    for rate, values in ((1e-3, (paper[0], 0.0)), (1e-4, (0.1, 0.2))):
        tests = [
            {"settings": {"length": length, "pairs": length // 16}, "accuracy": value, "history": [[1, value]]}
            for length, value in zip((64, 512), values, strict=True)
        ]
        made = row("mqar", {"train": 20}, "rwkv4", 64, 0.5, learning_rate=rate, tests=tests)
        rows.append({**made, "pool": [{"length": 64, "pairs": 4, "rows": 20}]})
    path = tmp_path / "pooled.json"
    path.write_text(json.dumps({"rows": rows, "runs": 4}))
    verdicts.main([str(path)])
    said = capsys.readouterr().out
    assert said.startswith("pooled.json: 2 of 4 runs") and "with retrieval" not in said
    assert "| rwkv4 | none | 64 | .955 / .955 |" in said and "| rwkv4 | none | 512 | .200 / .002 |" in said
    assert "| rwkv4 | none | 128 | not run |" in said
    assert "| all | 2 | 1 | 1 | 0 | 0 | .578 | .478 |  |" in said


def test_the_papers_selector_by_width_and_layer() -> None:
    rows = [
        row("mqar", {"length": 64, "pairs": 4}, mixer, 32, value, retrieval={"layer": 2, "selector": "hard"})
        for mixer, value in (("h3", 0.99961), ("hyena", 0.9991), ("mamba", 0.5))
    ]
    found = verdicts.tables({"rows": rows, "runs": 3})
    assert list(found) == ["table 11", "with retrieval", "below .999"]
    assert found["with retrieval"].splitlines()[2] == "| 32 | 2 | 3 | 2 | 1 | .5000 | .8329 |"
    assert found["below .999"].splitlines()[2:] == ["| mamba | 2 | 64 | 32 | .5000 |"]


def test_mad_by_layer_and_selector_in_both_metrics() -> None:
    """Means over seeds; attention stands beside the paper's Transformer."""
    settings = {"vocab_size": 16}
    rows = [row("mad_fuzzy_recall", settings, "mamba2", 128, value, seed=s) for s, value in enumerate((0.2, 0.4))]
    retrieval = {"layer": 3, "selector": "hard"}
    rows += [row("mad_fuzzy_recall", settings, "mamba2", 128, 0.8, retrieval=retrieval)]
    rows += [row("mad_compression", settings, "attention", 128, 0.5)]
    found = verdicts.tables({"rows": rows, "runs": 4})
    own, plain = found["MAD, MAD's own accuracy"], found["MAD, accuracy of all test labels"]
    assert "| .150 / .211 |" in own.splitlines()[2] and "| .300 / .211 |" in plain.splitlines()[2]
    assert own.splitlines()[3].startswith("| mamba2 | 3 | hard | not run / .466 |") and "| .400 / .629 |" in own
    assert own.splitlines()[4].startswith("| attention | none |  | .250 / .534 |")
