"""Result files as a demo run leaves them: plausible numbers, made up, deterministic."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PAIRS = (4, 8, 16, 32, 64)
LENGTHS = (512, 1024, 2048, 4096)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
EDGES = (0, 256, 512, 1024, 2048, 4096)


def accuracy(value: float, count: int) -> dict[str, Any]:
    half = 1.96 * math.sqrt(value * (1 - value) / count)
    return {
        "metric": "accuracy",
        "value": value,
        "count": count,
        "low": max(0.0, value - half),
        "high": min(1.0, value + half),
    }


def evaluation(strength: float, label: str | None = None, distances: tuple[int, ...] = (0, 512)) -> dict[str, Any]:
    """A result whose recall reaches about `strength` pairs."""
    results: list[dict[str, Any]] = []
    for distance in distances:
        for pairs in PAIRS:
            share = 1 / (1 + (pairs / (strength / (1 + distance / 2000))) ** 2.2)
            results.append(
                {"task": "phonebook", "cell": {"pairs": pairs, "distance": distance}, **accuracy(share, 4096)}
            )
    for length in LENGTHS:
        for depth in DEPTHS:
            share = 1 / (1 + (length * (1.15 - depth) / (60 * strength)) ** 1.8)
            results.append({"task": "passkey", "cell": {"length": length, "depth": depth}, **accuracy(share, 256)})
    for start, end in pairwise(EDGES):
        bits = 2.35 - 0.06 * math.log2(end / 256) + max(0.0, math.log2(end / 512)) * 3.0 / strength
        common = {
            "task": "bits_per_byte",
            "cell": {"start": start, "end": end},
            "count": 64 * (end - start),
            "bytes": 9,
        }
        results.append({**common, "metric": "bits_per_byte", "value": bits, "low": bits - 0.03, "high": bits + 0.03})
        value = math.exp(bits * math.log(2))
        results.append({**common, "metric": "perplexity", "value": value, "low": value * 0.98, "high": value * 1.02})
    state = 20480 if strength < 20 else 81920
    surgery = [] if state == 20480 else [_record()]
    data: dict[str, Any] = {
        "schema": 1,
        "kind": "evaluation",
        "created": "2026-11-21T09:00:00+00:00",
        "longrecall": "0.1.0",
        "environment": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "hardware": "x86_64"},
        "checkpoint": {
            "path": "base",
            "fingerprint": f"{int(strength):02x}" * 32,
            "parameters": 1_204_864 + state // 10,
            "state_size": state,
            "surgery": surgery,
        },
        "settings": {"tasks": ["phonebook", "passkey"], "lengths": list(LENGTHS), "samples": 4096, "seed": 0},
        "results": results,
        "summary": {"phonebook.capacity": max((p for p in PAIRS if p < strength / 2.5), default=0)},
    }
    return data if label is None else data | {"label": label}


def _record() -> dict[str, Any]:
    return {
        "method": "grow_state",
        "init": "perturb",
        "layers": [0, 2],
        "seed": 0,
        "options": {"factor": 4},
        "touched": ["model.layers.0.mixer.in_proj.weight"],
        "state_size": {"before": 20480, "after": 81920},
        "parameters": {"before": 1_206_912, "after": 1_213_056},
    }


def training(label: str | None = None, steps: int = 300) -> dict[str, Any]:
    log = [
        {
            "step": step,
            "tokens": step * 8192,
            "loss": 1.4 + 1.1 * math.exp(-step / 60) + 0.08 * math.sin(step * 1.7),
            "learning_rate": 1e-3 * math.cos(step / steps * math.pi / 2),
        }
        for step in range(1, steps + 1)
    ]
    recipe = {"model": {"checkpoint": "bigger"}, "run": {"steps": steps, "seed": 0}, "optimizer": {"touched": "10x"}}
    data = {"schema": 1, "kind": "training", "created": "2026-11-21T09:10:00+00:00", "recipe": recipe, "log": log}
    return data if label is None else data | {"label": label}


def write(folder: Path, **files: dict[str, Any]) -> list[str]:
    """Write each as `<name>.json`, return the paths in order."""
    paths = []
    for name, data in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        paths.append(str(path))
    return paths


@pytest.fixture
def synthetic(tmp_path: Path) -> SimpleNamespace:
    """`evaluation` and `training` make files' contents, `write(**files)` puts them into a fresh folder."""
    return SimpleNamespace(
        evaluation=evaluation, training=training, write=lambda **files: write(tmp_path, **files), folder=tmp_path
    )
