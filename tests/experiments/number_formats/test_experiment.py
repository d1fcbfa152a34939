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
    changes = {
        (form, key[2] == "2048"): []
        for form in report.COMPARED
        for key in report.by_question()
    }  # fmt: skip
    for key, forms in report.by_question().items():
        for form, first in report.COMPARED.items():
            changes[form, key[2] == "2048"].append(report.difference(forms[first], forms[form]))
    largest = {at: pages.number(max(abs(mean) for mean, _, _ in found)) for at, found in changes.items()}
    beyond = {at: sum(low > 0 or high < 0 for _, low, high in found) for at, found in changes.items()}
    PLACEHOLDER
