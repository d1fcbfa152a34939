"""Result files as a demo run leaves them: plausible numbers, made up, deterministic."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_svg import FigureCanvasSVG

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


def lengths_evaluation(strength: float, label: str | None = None, trained: int | None = 20) -> dict[str, Any]:
    """A result of copying and stories."""
    data = evaluation(strength, label)
    results: list[dict[str, Any]] = []
    for letters in (10, 20, 40, 80, 160):
        share = 1 / (1 + (letters / strength) ** 3)
        cell = {"task": "copying", "cell": {"length": letters}}
        results.append({**cell, **accuracy(share, 256)})
        results.append({**cell, **accuracy(share**0.25, 256 * letters), "metric": "character_accuracy"})
    for task in range(1, 6):
        for length in (256, 512, 1024, 2048, 4096):
            share = 1 / (1 + (length * task / (200 * strength)) ** 1.2)
            cell = {"task": "babilong", "cell": {"task": f"qa{task}", "length": length}}
            results.append({**cell, **accuracy(share, 100)})
            results.append({**cell, **accuracy(share * 0.9, 100), "metric": "exact_match"})
    settings = data["settings"] | {"options": {"copying": {"trained": trained, "opening": True}}}
    checkpoint = data["checkpoint"] | {"context_length": 512}
    return data | {"results": results, "settings": settings, "checkpoint": checkpoint, "summary": {}}


def diagnosis(health: float, label: str | None = None, layers: int = 2, heads: int = 2) -> dict[str, Any]:
    """A diagnosis of a model trained on 512 tokens; with `health` 1 nothing goes wrong beyond."""
    edges = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    ill = 1 - health
    perplexity = [
        {"start": start, "end": end, "loss": loss, "bits_per_byte": loss / math.log(2), "low": loss - 0.05}
        | {"high": loss + 0.06, "count": 8}
        for start, end in pairwise(edges)
        for loss in [1.7 - 0.05 * math.log2(end / 64) + ill * max(0.0, math.log2(end / 512)) ** 1.5]
    ]
    positions = [16 * 2**power for power in range(10)]

    def head(layer: int, number: int) -> dict[str, Any]:
        growth = [math.log2(place / 8) ** (1 + ill) * (1 + 0.2 * number) / (1 + layer) for place in positions]
        return {
            "mean": [0.01 * value for value in growth],
            "std": [0.1 * value for value in growth],
            "norm": growth,
            "effective_rank": [16 * (0.3 + 0.6 * (place / 8192) ** 0.3 - 0.05 * number) for place in positions],
            "stable_rank": [1.0 for _ in positions],
        }

    state = [
        {"layer": layer, "mixer": "mamba2", "key_dim": 16, "value_dim": 64}
        | {"heads": [head(layer, number) for number in range(heads)]}
        for layer in range(layers)
    ]
    left_out = [0, 512, 1024, 2048, 4096, 6144, 7168, 7680, 7936, 8064, 8128, 8160, 8191]
    remembrance = [
        {"t": t, "value": value, "low": max(0.0, value - 0.05), "high": min(1.0, value + 0.05), "count": 8}
        for t in left_out
        for value in [min(0.95, (0.7 * ill if t else 0.0) + 0.25 / math.log2(8192 - t + 2))]
    ]
    recall = [
        {"length": length, "value": value, "low": max(0.0, value - 0.1), "high": min(1.0, value + 0.1), "count": 40}
        for length in (128, 256, 512, 1024, 2048, 4096, 8192)
        for value in [1 / (1 + (length / (700 + 9000 * health)) ** 2)]
    ]
    finding = {
        "finding": "length" if ill else "healthy",
        "text": "perplexity rises above its 512-token level at 700" if ill else "nothing is wrong up to 8192 tokens",
        "advice": "post-train with state passing: longrecall train recipes/post_train.yaml" if ill else "",
        "numbers": {"position": 700},
    }
    data: dict[str, Any] = {
        **{key: evaluation(9)[key] for key in ("schema", "created", "longrecall", "environment", "checkpoint")},
        "kind": "diagnosis",
        "settings": {"text": "book.txt", "training_length": 512, "multiple": 16, "sequences": 8, "seed": 0},
        "perplexity": perplexity,
        "state": {"positions": positions, "layers": state},
        "remembrance": {"length": 8192, "points": remembrance},
        "recall": {"points": recall, "maximum": {"0.5": 700 if ill else 8192, "0.8": None if ill else 4096}}
        | {"maximum_intervals": {"0.5": [512, 1024] if ill else [8192, 8192], "0.8": [None, 700]}},
        "verdict": [finding],
    }
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
        evaluation=evaluation,
        training=training,
        lengths=lengths_evaluation,
        diagnosis=diagnosis,
        write=lambda **files: write(tmp_path, **files),
        folder=tmp_path,
    )


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made and named, but empty: to draw them is most of the time that a page takes."""
    monkeypatch.setattr(FigureCanvasSVG, "print_svg", lambda _, buffer, **__: buffer.write("<svg></svg>"))
