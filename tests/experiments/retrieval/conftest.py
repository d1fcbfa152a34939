"""What the tests of docs/retrieval_evidence.md and its folder ask for."""

from __future__ import annotations

import pytest

from tests.experiments.retrieval.page import page_prose


@pytest.fixture
def prose() -> str:
    """docs/retrieval_evidence.md and the pages of its folder without their tables, as one line."""
    return page_prose()
