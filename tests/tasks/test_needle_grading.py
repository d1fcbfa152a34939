"""How answers about needles are graded, and passkey in the model's own words."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.tasks import GradedTask, Passkey, PieceEncoder, SpokenPasskey, create_task, prefix_score
from longrecall.tasks.needles import contained
from tests.conftest import PlainBytes

BYTES = PieceEncoder(PlainBytes())


def by_definition(needle: str, said: str, shortest: int) -> float:
    """RESONA's appendix A.5 word by word: cut the needle from its end until the rest is found."""
    for size in range(len(needle), 0, -1):
        if needle[:size] in said:
            return 5 * size / len(needle) if size >= shortest or size == len(needle) else 0.0
    return 0.0


@given(needle=st.text("012", min_size=1, max_size=6), said=st.text("012 ", max_size=20), shortest=st.integers(1, 7))
@example(needle="1234567", said="it is 1234567.", shortest=1)
@example(needle="1234567", said="", shortest=1)
def test_prefix_score_is_the_published_search(needle: str, said: str, shortest: int) -> None:
    # Both sides divide the same small integers once: exactly equal.
    assert prefix_score(needle, said, shortest) == by_definition(needle, said, shortest)


def test_prefix_score_examples() -> None:
    assert prefix_score("4820197", "The number is 4820197, I think.") == 5.0
    assert prefix_score("4820197", "The number is 4820000.") == 5 * 4 / 7
    assert prefix_score("4820197", "The number is 4820000.", shortest=5) == 0.0
    assert prefix_score("abc", "ABX") == 5 * 2 / 3
    assert prefix_score("ab", "ab", shortest=9) == 5.0
    with pytest.raises(UserError, match="the needle is empty"):
        prefix_score("", "x")


def test_contains_is_a_share_and_ignores_case() -> None:
    assert contained(["A-1", "b2"], "x a-1 y") == 0.5
    assert contained(["A-1", "b2"], "B2a-1") == 1.0
    assert contained(["12"], "1 2") == 0.0


def graded(name: str, **options: Any) -> tuple[Any, Any, Any]:
    task = create_task(name, **options)
    assert isinstance(task, GradedTask)
    (cell, *_) = task.cells([2000])
    return task, cell, task.sample(BYTES, cell, 0, 0)


def test_a_question_with_four_answers_can_be_partly_right() -> None:
    task, cell, sample = graded("niah_multivalue", shortest_prefix=3)
    first, *others = sample.accepted
    assert len(others) == 3 and sample.target == ", ".join(sample.accepted)
    assert task.grades(cell, sample, f"It is {first}") == {"contains": 0.25, "prefix_score": 1.25}
    assert not task.judge(cell, sample, f"It is {first}") and not task.settled(sample, f"It is {first}")
    every = " and ".join(reversed(sample.accepted))
    assert task.grades(cell, sample, every) == {"contains": 1.0, "prefix_score": 5.0}
    assert task.judge(cell, sample, every) and task.settled(sample, every) and not task.ended(every)


def test_uuids_in_capitals_count() -> None:
    task, cell, sample = graded("niah_single_3")
    assert task.judge(cell, sample, f"<{sample.target.upper()}>")
    assert not task.judge(cell, sample, sample.target[:-1])


@pytest.mark.parametrize("form", ["statex", "infinitebench"])
def test_spoken_passkey_asks_what_passkey_asks(form: str) -> None:
    spoken, plain = SpokenPasskey(form=form), Passkey(form=form)
    assert spoken.cells([700]) == plain.cells([700])
    for encode in (BYTES, PieceEncoder(byte_tokenizer())):
        for cell in plain.cells([700]):
            same, sample = plain.sample(encode, cell, 4, 2), spoken.sample(encode, cell, 4, 2)
            assert sample.input_ids.tolist() == same.input_ids.tolist()
            assert sample.labels.tolist() == same.labels.tolist()
            assert bytes(sample.input_ids[-5:].tolist()).decode() == sample.target


@pytest.mark.parametrize(
    ("said", "statex", "first_run", "settled"),
    [
        ("{}", True, True, False),
        ("{}.", True, True, True),
        ("not 7, but {}.", True, False, True),
        ("{}1 ", True, False, True),
        ("none", False, False, False),
        ("7 is it", False, False, False),
        ("", False, False, False),
    ],
)
def test_each_form_is_judged_by_its_own_rule(said: str, statex: bool, first_run: bool, settled: bool) -> None:
    for form, right in (("statex", statex), ("infinitebench", first_run)):
        task, cell, sample = graded("passkey_spoken", form=form)
        assert re.fullmatch("[0-9]{5}", sample.target)
        text = said.format(sample.target)
        assert task.judge(cell, sample, text) == right and task.settled(sample, text) == settled
        assert task.grades(cell, sample, text)["contains"] == float(statex)


@given(words=st.lists(st.sampled_from(["0", "1", "01", "10", ".", " a"]), max_size=12))
def test_settled_means_that_nothing_changes(words: list[str]) -> None:
    for form in ("statex", "infinitebench"):
        task = SpokenPasskey(form=form, digits=2)
        cell = task.cells([400])[0]
        sample = next(s for s in (task.sample(BYTES, cell, i, 0) for i in range(10**4)) if set(s.target) <= {"0", "1"})
        told = ""
        for place, word in enumerate(words):
            told += word
            if task.settled(sample, told):
                later = told + "".join(words[place + 1 :])
                assert task.judge(cell, sample, told) == task.judge(cell, sample, later)
                assert task.grades(cell, sample, told) == task.grades(cell, sample, later)


class NoDigits(PlainBytes):
    def decode(self, ids: list[int]) -> str:
        return re.sub("[0-9]", "?", bytes(ids).decode())


def test_spoken_passkey_bad_input() -> None:
    with pytest.raises(UserError, match="cannot represent the key"):
        SpokenPasskey().sample(PieceEncoder(NoDigits()), {"length": 500, "depth": 0.0}, 0, 0)
    with pytest.raises(UserError, match="answer_tokens must be at least 1, got 0"):
        SpokenPasskey(answer_tokens=0)
    with pytest.raises(UserError, match="shortest_prefix must be at least 1, got 0"):
        SpokenPasskey(shortest_prefix=0)
    with pytest.raises(UserError, match='Did you mean "statex"'):
        SpokenPasskey(form="statx")
