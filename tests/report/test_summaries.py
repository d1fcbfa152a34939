from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.evaluation.statistics import wilson_interval
from longrecall.report.inputs import Evaluation, Measurement, read_inputs
from longrecall.report.summaries import Number, before_and_after, control_of, difference, headlines, mean


def share(successes: int, count: int) -> Number:
    return Number(successes / count, *wilson_interval(successes, count))


@pytest.mark.parametrize(
    ("after", "before", "low", "high"),
    [((56, 70), (48, 80), 0.0524, 0.3339), ((10, 10), (0, 10), 0.6075, 1.0), ((9, 10), (3, 10), 0.1705, 0.8090)],
)
def test_difference_agrees_with_newcombe_1998_method_10(
    after: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    found = difference(share(*after), share(*before))
    # Table II of the paper prints four digits.
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


@st.composite
def numbers(draw: st.DrawFn) -> Number:
    value = draw(st.floats(-5, 5))
    return Number(value, value - draw(st.floats(0, 2)), value + draw(st.floats(0, 2)))


@given(numbers(), numbers())
def test_difference_holds_its_value_and_turns_around(a: Number, b: Number) -> None:
    forth, back = difference(a, b), difference(b, a)
    assert forth.value is not None and forth.low is not None and forth.high is not None
    assert back.low is not None and back.high is not None
    assert forth.low <= forth.value <= forth.high
    # The same sums in another order: exact but for rounding of numbers below 20.
    assert (forth.low, forth.high) == (pytest.approx(-back.high, abs=1e-12), pytest.approx(-back.low, abs=1e-12))


def test_what_is_unknown_stays_unknown() -> None:
    known, bare, none = Number(1.0, 0.9, 1.1), Number(0.5), Number(None)
    assert difference(known, none) == difference(none, known) == Number(None)
    assert difference(known, bare) == Number(0.5)
    assert mean([]) == Number(None)


def measured(value: float | None, low: float | None, high: float | None) -> Measurement:
    return Measurement("phonebook", {"pairs": 4}, "accuracy", value, low, high, 10)


def test_mean_adds_half_widths_in_squares() -> None:
    found = mean([measured(0.5, 0.4, 0.6), measured(0.7, 0.7, 0.7), measured(0.9, 0.8, 1.0), measured(0.3, 0.2, 0.4)])
    assert found.value == pytest.approx(0.6)
    # sqrt(3 * 0.1^2) / 4
    assert found.high == pytest.approx(0.6 + 0.0433, abs=1e-4)
    assert found.low == pytest.approx(0.6 - 0.0433, abs=1e-4)


def test_mean_with_a_diverged_cell_is_unknown_and_without_intervals_has_none() -> None:
    assert mean([measured(0.5, 0.4, 0.6), measured(None, None, None)]) == Number(None)
    assert mean([measured(0.5, None, None), measured(0.7, 0.6, 0.8)]) == Number(pytest.approx(0.6))


def evaluations(synthetic: SimpleNamespace, *labels: str) -> tuple[Evaluation, ...]:
    files = {f"file{index}": synthetic.evaluation(5 + index, label) for index, label in enumerate(labels)}
    return read_inputs(synthetic.write(**files)).evaluations


@pytest.mark.parametrize(
    ("labels", "pair", "control"),
    [
        (("before", "after"), ("before", "after"), None),
        (("after", "before"), ("before", "after"), None),
        (("base", "handover", "preserve"), ("base", "preserve"), None),
        (("base", "grown", "Control"), ("base", "grown"), "Control"),
        (("before", "plain continued training", "after"), ("before", "after"), "plain continued training"),
        (("grown", "after"), ("grown", "after"), None),
        (("before", "control"), None, "control"),
        (("only",), None, None),
    ],
)
def test_which_files_are_compared(
    synthetic: SimpleNamespace, labels: tuple[str, ...], pair: tuple[str, str] | None, control: str | None
) -> None:
    entries = evaluations(synthetic, *labels)
    found = before_and_after(entries)
    assert (None if found is None else (found[0].label, found[1].label)) == pair
    chosen = control_of(entries)
    assert (None if chosen is None else chosen.label) == control


def test_headlines_name_the_hardest_cells(synthetic: SimpleNamespace) -> None:
    (entry,) = evaluations(synthetic, "before")
    rows = {row.name: row.number(entry).value for row in headlines([entry])}
    hardest = [m.value for m in entry.of("phonebook", "accuracy") if m.cell["pairs"] == 64]
    assert rows["phone book: accuracy at 64 pairs"] == pytest.approx(sum(hardest) / len(hardest))
    longest = [m.value for m in entry.of("passkey", "accuracy") if m.cell["length"] == 4096]
    assert rows["pass key: accuracy at 4k tokens"] == pytest.approx(sum(longest) / len(longest))
    assert {"bits per byte at positions 0 to 256", "bits per byte at positions 2,048 to 4,096"} <= rows.keys()
    assert (
        rows["phone book: most pairs recalled at 90% or better, of 4, 8, 16, 32, 64"]
        == entry.data["summary"]["phonebook.capacity"]
    )
