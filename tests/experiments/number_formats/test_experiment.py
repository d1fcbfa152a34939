"""Recall by number formats: what is asked, how it is read, and what the page says of it."""

from __future__ import annotations

import torch

import longrecall
from experiments.common import pages
from experiments.number_formats import experiment, report


def test_every_form_is_asked_the_same_and_rounded_as_it_says() -> None:
    model = longrecall.load(experiment.ASSETS / "gla-base")
    cell = next(experiment.cells(0.004))
    (right, asked), again = (experiment.right_answers(model, cell, None, 0) for _ in range(2))
    assert (right, asked) == again and asked == 2 and len(right) == cell.rows == 2
    # Of a state in bfloat16 the last bits are gone: other logits, and mostly the same answers.
    rounded, _ = experiment.right_answers(model, cell, torch.bfloat16, 0)
    assert abs(sum(rounded) - sum(right)) <= 1
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(experiment.guesses(model, ids, None), model(ids).logits.argmax(-1))


def test_what_the_page_says() -> None:
    prose = " ".join((pages.DOCS / report.PAGE).read_text(encoding="utf-8").split())
    changes: dict[tuple[str, bool], list[tuple[float, float, float]]] = {}
    for key, forms in report.by_question().items():
        for form, first in report.COMPARED.items():
            found = report.difference(forms[first], forms[form])
            changes.setdefault((form, key[2] == "2048"), []).append(found)

    def told(form: str) -> tuple[int, float, str, str, int]:
        """How many, the largest and how far down an interval reaches, at the trained length; intervals without zero."""
        found = changes[form, False]
        largest = max((mean for mean, _, _ in found), key=abs)
        lowest = min(low for _, low, _ in found)
        beyond = sum(high < 0 for _, _, high in found)
        return len(found), largest, pages.number(abs(largest)), pages.number(lowest), beyond

    count, largest, size, lowest, beyond = told("bf16 states")
    assert count == 10 and largest > 0 and beyond == 0
    assert (
        f"of ten differences the largest is {size}, upwards, and no interval reaches further down than {lowest}"
        in prose
    )
    _, _, size, lowest, beyond = told("int8 weights")
    assert f"Nor do int8 weights: {size} and {lowest}." in prose and beyond == 0
    _, largest, size, _, beyond = told("fp8 weights")
    assert f"up to {size} down, one interval below zero" in prose and largest < 0 and beyond == 1
    (gla, _, high), (mamba, low, _) = changes["bf16 states", True]
    sizes = pages.number(mamba), pages.number(-gla)
    assert "Mamba-2 found {} more keys and GLA {} fewer, the latter within its interval".format(*sizes) in prose
    assert low > 0 and high > 0 > gla
