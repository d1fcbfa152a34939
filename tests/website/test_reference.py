"""docs/reference/: what is generated is up to date, and every public name has an example that runs."""

from __future__ import annotations

import doctest
import io

import pytest

from website.api import Public, public_names, section_body
from website.reference import stale

NAMES = public_names()


def test_generated_pages_say_what_the_code_says() -> None:
    assert stale(write=False) == [], "run python -m website.reference"


def test_an_entry_goes_on_in_its_next_line() -> None:
    assert section_body("Raises", ["    UserError: a bad value,", "        or none."]) == [
        "- `UserError`: a bad value, or none."
    ]


@pytest.mark.parametrize("public", NAMES, ids=lambda public: f"{public.module}.{public.name}")
def test_every_public_name_has_an_example_that_runs(public: Public) -> None:
    example = public.examples()
    assert any(public.name in step.source for step in example.examples), "its docstring has no example of it"
    told = io.StringIO()
    assert doctest.DocTestRunner(verbose=False).run(example, out=told.write).failed == 0, told.getvalue()
