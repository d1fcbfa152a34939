"""What most tests of docs/retrieval_evidence.md ask for; tests of another page have their own by the same names."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.experiments.retrieval_page import experiment, page_prose


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """experiments/report_retrieval.py as a module."""
    return experiment("report_retrieval", monkeypatch)


@pytest.fixture
def prose() -> str:
    """docs/retrieval_evidence.md without its tables, as one line."""
    return page_prose()
