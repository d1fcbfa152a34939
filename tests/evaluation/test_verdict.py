"""Verdicts in words: what is called better, worse or unknown, and the numbers that stand in the sentences."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from longrecall.evaluation.comparison import compare_files
from longrecall.evaluation.differences import difference_of
from longrecall.evaluation.outcomes import pack_scores
from longrecall.evaluation.verdict import Verdict, all_in_words, compare_in_words, describe_in_words

from .test_comparison import BETTER, KEY, WORSE, bits, entry, result

LABELS = ("before", "after")


def compared(first: dict[str, Any], second: dict[str, Any]) -> Verdict:
    found = compare_in_words(first, second, LABELS)
    assert found is not None
    return found


def outcomes(verdict: Verdict) -> dict[str, str | None]:
    return {statement.task: statement.outcome for statement in verdict.statements}


def test_each_task_is_better_worse_or_unknown() -> None:
    book = {"pairs": 4, "distance": 0}
    first = result(
        entry("passkey", KEY, WORSE), entry("phonebook", book, WORSE), bits(256, [100.0 + i for i in range(9)])
    )
    second = result(
        entry("passkey", KEY, BETTER), entry("phonebook", book, WORSE), bits(256, [120.0 + i for i in range(9)])
    )
    verdict = compared(first, second)
    assert outcomes(verdict) == {"passkey": "better", "bits_per_byte": "worse", "phonebook": "cannot tell"}
    assert verdict.opening == "After against before. Better: pass key. Worse: bits per byte. Cannot tell: phone book."
    assert outcomes(compared(second, first))["bits_per_byte"] == "better", "fewer bits are better"
    told = {statement.task: statement.sentence for statement in verdict.statements}
    # 34 of 64 to 60 of 64; the interval is that of `longrecall compare`.
    assert told["passkey"].startswith("Better. Right answers: before 53.1%, after 93.8%, ")
    assert "fewer is better" in told["bits_per_byte"] and " more (95% interval" in told["bits_per_byte"]
    assert told["phonebook"].startswith(
        "Cannot tell. Right answers: before 53.1%, after 53.1%; the difference lies between "
    )
    assert verdict.method.startswith("Both were asked the same questions") and "3 tasks" in verdict.method
    assert verdict.lines[1].startswith("  Pass key: Better. ")


def test_the_interval_of_one_cell_is_the_one_of_compare(tmp_path: Any) -> None:
    first, second = result(entry("passkey", KEY, WORSE)), result(entry("passkey", KEY, BETTER))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, data in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(data))
    (row,) = compare_files(*paths)["results"]
    found = difference_of([(first["results"][0], second["results"][0])], "passkey", alike=True)
    assert found is not None and found.paired
    assert (found.low, found.high, found.p) == (row["low"], row["high"], row["p"])


def test_unequal_questions_are_compared_as_independent_samples_with_less_certainty() -> None:
    right = [1] * 40 + [0] * 24
    first, second = result(entry("passkey", KEY, right)), result(entry("passkey", KEY, [1] * 48 + [0] * 16))
    for data in (first, second):
        share = data["results"][0]["value"]
        half = 1.96 * math.sqrt(share * (1 - share) / 64)
        data["results"][0] |= {"low": share - half, "high": share + half}
    paired = compared(first, second)
    apart = compared(first, {**second, "settings": second["settings"] | {"seed": 1}})
    assert outcomes(paired) == {"passkey": "better"} and outcomes(apart) == {"passkey": "cannot tell"}
    assert apart.method.startswith("The two are compared as independent samples")
    assert "2.4 points fewer" not in paired.statements[0].sentence
    # 0.125 +- 1.96 sqrt(2 * 0.25 * ... / 64): both Wald intervals added in squares.
    assert "between 3.4 points fewer and 28.4 more" in apart.statements[0].sentence


def test_settings_that_went_two_ways_are_both_told() -> None:
    cells = [{"pairs": pairs, "distance": 0} for pairs in (2, 32)]
    first = result(entry("phonebook", cells[0], BETTER), entry("phonebook", cells[1], WORSE))
    second = result(entry("phonebook", cells[0], WORSE), entry("phonebook", cells[1], BETTER))
    (statement,) = compared(first, second).statements
    assert statement.outcome == "cannot tell"
    assert (
        "Clearly better in 1 of 2 settings, most among 32 pairs (53.1% to 93.8%); worse in 1 of 2 settings"
        in statement.sentence
    )


def test_windows_of_one_text_are_one_unit_each_in_all_positions() -> None:
    # Two ranges of the same three windows: three units, not six.
    first = result(bits(256, [90.0, 100.0, 110.0]), bits(512, [95.0, 100.0, 105.0]))
    second = result(bits(256, [91.0, 102.0, 113.0]), bits(512, [96.0, 102.0, 108.0]))
    pairs = list(zip(first["results"], second["results"], strict=True))
    found = difference_of(pairs, "bits_per_byte", alike=True)
    assert found is not None and found.value == pytest.approx(12 / 600)
    # All signs of three differences: 2 of 8 patterns are as far from 0.
    assert found.p == pytest.approx(0.25)
    assert outcomes(compared(first, second)) == {"bits_per_byte": "cannot tell"}


def test_one_diverged_side_is_told_and_nothing_is_made_of_it() -> None:
    cells = [{"length": 512, "depth": depth} for depth in (0.0, 1.0)]
    first = result(*(entry("passkey", cell, BETTER) for cell in cells))
    second = result(entry("passkey", cells[0], BETTER), entry("passkey", cells[1], BETTER))
    for lost in (None, math.nan):
        second["results"][1] |= {"value": lost, "low": None, "high": None, "outcomes": None}
        (statement,) = compared(first, second).statements
        assert statement.outcome == "worse"
        assert "In 1 of 2 settings only after gives no finite number." in statement.sentence
    first["results"][1] |= {"value": None, "outcomes": None}
    assert outcomes(compared(first, second)) == {"passkey": "cannot tell"}


def test_what_only_chance_may_explain_is_not_called_better() -> None:
    weak = [1] * 40 + [0] * 24, [1] * 46 + [0] * 18
    names = ("phonebook", *(f"niah_{index}" for index in range(9)))
    options = {name: {"n": 1} for name in names}
    first = result(*(entry(name, KEY | {"pairs": 4}, weak[0]) for name in names), options=options)
    changed = [weak[1], *([weak[0]] * 9)]
    second = result(*(entry(n, KEY | {"pairs": 4}, c) for n, c in zip(names, changed, strict=True)), options=options)
    statement = next(s for s in compared(first, second).statements if s.task == "phonebook")
    assert statement.outcome == "cannot tell" and "can be chance" in statement.sentence
    alone = [data | {"results": data["results"][:1]} for data in (first, second)]
    assert outcomes(compared(*alone)) == {"phonebook": "better"}


def test_nothing_in_common_is_no_verdict_and_a_score_without_units_has_no_interval() -> None:
    assert compare_in_words(result(entry("passkey", KEY, WORSE)), result(), LABELS) is None
    graded = {"task": "graded", "cell": {"length": 5}, "metric": "score", "count": 1, "low": None, "high": None}
    first = result(graded | {"value": 1.5, "outcomes": pack_scores([1.5])}, options={"graded": {}})
    second = result(graded | {"value": 2.5, "outcomes": pack_scores([2.5])}, options={"graded": {}})
    (statement,) = compared(first, second).statements
    assert statement.sentence == "Cannot tell. Score: before 1.500, after 2.500; too few measurements for an interval."


def test_the_method_is_said_once() -> None:
    first, second = result(entry("passkey", KEY, WORSE)), result(entry("passkey", KEY, BETTER))
    one, two = all_in_words([(first, second, LABELS, ""), (first, second, ("control", "after"), "the same training")])
    assert one.method == "" and two.method
    assert two.opening.startswith("After against control, the same training. Better: ")


def test_one_file_alone_is_described() -> None:
    cells = [{"pairs": pairs, "distance": 0} for pairs in (2, 32)]
    data = result(entry("phonebook", cells[0], BETTER), entry("phonebook", cells[1], WORSE))
    found = describe_in_words(data, "base")
    assert found is not None and found.opening == "What was measured of base; nothing is compared here."
    (statement,) = found.statements
    assert statement.outcome is None
    assert statement.sentence.startswith("Right answers: 73.4% (95% interval ")
    assert statement.sentence.endswith("over 2 settings; worst among 32 pairs, 53.1%.")
    assert describe_in_words(result(), "base") is None
