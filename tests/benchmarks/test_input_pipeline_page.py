"""The figures of the input pipeline in docs/training_data.md are those of the recorded run."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tokens_a_second_by_kind() -> None:
    record = json.loads((ROOT / "benchmarks/results/input_pipeline.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "training_data.md").read_text(encoding="utf-8")
    found = {(row["kind"], row["workers"]): row for row in record["results"]}
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    assert record["settings"]["gpu"] == 180_000 and "It takes 0.18 million tokens a second" in page
    for kind in kinds:
        speeds = [found[kind, workers]["tokens_per_second"] / 1e6 for workers in (1, 2, 4, 8)]
        cells = [f"{speed:.2f}" if speed < 10 else f"{speed:.1f}" for speed in speeds]
        assert f"| `{kind}` | {' | '.join(cells)} | {found[kind, 8]['of_a_gpu']:.0f} |" in page
    # What the page says below its table.
    assert all(found[kind, 1]["of_a_gpu"] > 4 for kind in kinds) and "one worker feeds four" in page
    tokens = [found["tokens", workers]["tokens_per_second"] for workers in (1, 2, 4, 8)]
    assert tokens[1] > max(tokens[0], tokens[2]) > min(tokens[0], tokens[2]) > tokens[3]
