"""What docs/retrieval_evidence.md says of time and memory is what the recorded benchmark says."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.experiments.retrieval_page import experiment, page_prose

Timed = Mapping[str, Mapping[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return experiment("report_retrieval", monkeypatch)


def overheads(script: ModuleType, timed: Timed, what: str) -> list[float]:
    names = [f"{{}}: {what} {tokens}" for tokens in script.TIMED]
    return [
        timed[name.format(f"{model} with retrieval")]["ms"] / timed[name.format(model)]["ms"] - 1
        for model in script.MODELS
        for name in names
    ]


def test_reading_and_decoding(script: ModuleType) -> None:
    timed, prose = script.timings(), page_prose()
    read, decoded = (overheads(script, timed, what) for what in ("reading", "continuing after"))
    assert f"Reading 2k to 128k tokens takes {min(read):.1%} to {max(read):.1%} longer" in prose
    recorded = [row["overhead"] for name, row in timed.items() if "with retrieval: reading" in name]
    assert recorded == pytest.approx(read)
    within = sum(overhead <= 0.1 for overhead in decoded)
    assert (
        f"A token after them takes {min(decoded):.1%} to {max(decoded):.1%} longer: within 10% in {within} of " in prose
    )
    assert f"of {len(decoded)} cases" in prose and within < len(decoded)
    assert decoded.index(max(decoded)) == len(decoded) - 1  # Gated DeltaNet after 128k


def test_what_chance_makes(script: ModuleType) -> None:
    timed, spread = script.timings(), {}
    for model, shown in script.MODELS.items():
        times = [timed[f"{model}: continuing after {tokens}"]["ms"] for tokens in script.TIMED]
        spread[shown] = max(times) / min(times) - 1
    words = ", ".join(f"{spread[name]:.0%} ({name})" for name in ("GLA", "Gated DeltaNet", "Mamba-2"))
    assert f"differ by {words} here" in page_prose()


def test_prompts_of_recurrent_models_are_captured(script: ModuleType) -> None:
    captured = {name: row["captured"] for name, row in script.timings().items() if ": reading " in name}
    assert all(captured[name] != name.startswith(script.TRANSFORMER) for name in captured)
