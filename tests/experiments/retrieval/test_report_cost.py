"""What docs/retrieval_evidence/cost.md says is what the recorded benchmark says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.retrieval import report
from longrecall.inference import reading
from longrecall.layers.mixers.attention import AttentionConfig
from longrecall.models.description import read_description
from tests.experiments.retrieval.page import page_prose

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"
Timed = Mapping[str, Mapping[str, Any]]


def overheads(timed: Timed, what: str) -> list[float]:
    names = [f"{{}}: {what} {tokens}" for tokens in report.TIMED]
    return [
        timed[name.format(f"{model} with retrieval")]["ms"] / timed[name.format(model)]["ms"] - 1
        for model in report.MODELS
        for name in names
    ]


def test_reading_and_decoding() -> None:
    timed, prose = report.timings(), page_prose()
    read, decoded = (overheads(timed, what) for what in ("reading", "continuing after"))
    assert f"Reading 2k to 128k tokens takes {min(read):.1%} to {max(read):.1%} longer" in prose
    recorded = [row["overhead"] for name, row in timed.items() if "with retrieval: reading" in name]
    assert recorded == pytest.approx(read)
    assert f"reading a text takes {min(read):.1%} to {max(read):.1%} longer" in prose
    assert f"and a token after it {min(decoded):.1%} to {max(decoded):.1%}." in prose
    assert f"A token after them takes {min(decoded):.1%} to {max(decoded):.1%} longer" in prose
    assert "The target of 10% is met." in prose and len(decoded) == 12 and max(decoded) <= 0.1


def test_decoding_beside_attention() -> None:
    timed, longest = report.timings(), report.TIMED[-1]
    attention = timed[f"{report.TRANSFORMER}: continuing after {longest}"]["ms"]
    times = [timed[f"{model} with retrieval: continuing after {longest}"]["ms"] for model in report.MODELS]
    words = f"{attention / max(times):.1f} to {attention / min(times):.1f} times less than in a Transformer"
    assert f"After 128k tokens it takes {words}" in page_prose()
    shorter = timed[f"{report.TRANSFORMER}: continuing after {report.TIMED[0]}"]["ms"]
    plain = [timed[f"{model}: continuing after {report.TIMED[0]}"]["ms"] for model in report.MODELS]
    assert min(plain) < shorter < max(plain) and "After 2k tokens it is as fast as the recurrent models" in page_prose()
    names = [f"{model} with retrieval: continuing after " for model in report.MODELS]
    grown = [timed[f"{name}{longest}"]["ms"] / timed[f"{name}{report.TIMED[0]}"]["ms"] - 1 for name in names]
    assert f"with retrieval by {max(grown):.0%} at most" in page_prose()


def test_the_memory_of_attention() -> None:
    config = read_description(CONFIGS / f"{report.TRANSFORMER}.json")
    mixers = [layer.mixer for layer in config.layer_configs()]
    # Keys and values in bfloat16.
    token = sum(4 * mixer.kv_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, AttentionConfig))
    *rooms, last = (reading.rounded_room(tokens + 130) * token / 2**30 for tokens in report.TIMED)
    cache = report.TIMED[-1] * token / 2**30
    first, *_, final = (report.timings()[f"{report.TRANSFORMER}: continuing after {n}"] for n in report.TIMED)
    rate = (report.TIMED[-1] - report.TIMED[0]) * token / (final["ms_per_token"] - first["ms_per_token"]) / 1e9
    prose = page_prose()
    assert f"the time to read the cache, at {rate:.1f} TB/s" in prose
    assert f"takes {token >> 10} KiB a token, {cache:.1f} GiB after 128k." in prose
    assert f"The buffer that a decoding step reads it from takes {last:.1f} GiB besides." in prose
    assert f"counts {sum(rooms):.1f} GiB of such buffers" in prose
    assert report.timings()[f"{report.TRANSFORMER}: reading {report.TIMED[-1]}"]["peak_gib"] > cache + sum(rooms)


def test_what_chance_makes() -> None:
    timed, spread = report.timings(), {}
    for model, shown in report.MODELS.items():
        times = [timed[f"{model}: continuing after {tokens}"]["ms"] for tokens in report.TIMED]
        spread[shown] = max(times) / min(times) - 1
    words = ", ".join(f"{spread[name]:.1%} ({name})" for name in ("GLA", "Gated DeltaNet", "Mamba-2"))
    assert f"differ by {words} here" in page_prose()
    assert max(spread.values()) < 0.02


def test_prompts_of_recurrent_models_are_captured() -> None:
    captured = {name: row["captured"] for name, row in report.timings().items() if ": reading " in name}
    assert all(captured[name] != name.startswith(report.TRANSFORMER) for name in captured)
