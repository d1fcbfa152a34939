"""Stories in a book: answers proven by a second reading of the text, exact lengths, labels, judging, bad input."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.tasks import (
    IGNORE,
    Babilong,
    PieceEncoder,
    answer_spans,
    babilong_byte_batch,
    babilong_sequence,
)
from longrecall.tasks.babilong.haystack import sentences, shipped_text, tokenise
from longrecall.tasks.babilong.task import TASKS
from longrecall.tasks.babilong.wording import FACTS, LABELS, judge, longest_story, tell
from longrecall.tasks.babilong.world import Draws
from tests.conftest import PlainBytes
from tests.tasks.story_solver import facts, solve

BYTES = PieceEncoder(PlainBytes())
HELD_OUT = shipped_text("held_out")
END = re.compile(r"Question: ([^\n]*)\nAnswer: (\w+)(\.\n)?")


class WordTokenizer:
    """One token per word with the space before it."""

    def __init__(self) -> None:
        self.pieces: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.pieces.setdefault(piece, len(self.pieces)) for piece in re.findall(r" ?\w+|\s|.", text)]

    def decode(self, ids: np.ndarray) -> str:
        spelled = {token: piece for piece, token in self.pieces.items()}
        return "".join(spelled[int(token)] for token in ids)


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def text_of(ids: np.ndarray) -> str:
    return bytes(ids.astype(np.uint8)).decode("utf-8", errors="replace")


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_the_text(task: str) -> None:
    lows, highs = FACTS[task]
    answers, counts = Counter[str](), Counter[int]()
    for index in range(400):
        sample = Babilong().sample(BYTES, {"task": task, "length": 1500}, index, 0)
        text = text_of(sample.input_ids)
        match = END.search(text)
        assert match and match.end() == len(text)
        assert (match[1], match[2]) == (sample.question, sample.target)
        assert solve(text[: match.start()], match[1]) == match[2]
        assert match[2] in LABELS[task] and judge(task, match[1], match[2], f" {match[2]}.")
        answers[match[2]] += 1
        counts[len(facts(text))] += 1
    assert set(counts) == set(range(lows, highs + 1))
    assert set(answers) == set(LABELS[task])
    # A guesser that always says the most frequent answer: 1/6 for places, 1/7 for people and things, were all alike.
    # People are right more often than things in qa5 (four of five questions), hence the wider bound there.
    assert max(answers.values()) / 400 < (0.32 if task == "qa5" else 0.25)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**40), task=st.sampled_from(TASKS), count=st.integers(0, 30), questions=st.integers(1, 4))
def test_stories_of_any_size_have_answers(seed: int, task: str, count: int, questions: int) -> None:
    fewest = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 2, "qa5": 4}[task]
    count = min(fewest + count, 4) if task == "qa4" else fewest + count
    story, asked = tell(Draws(generator(seed)), task, count, questions)
    assert len(story) == count and facts("\n".join(story)) == story and len(asked) == questions
    for question in asked:
        assert solve("\n".join(story), question.text) == question.answer
    told, wordings = longest_story(task)
    assert set(story) <= set(told) and {question.text for question in asked} <= set(wordings)


def test_of_many_fitting_gifts_the_last_counts() -> None:
    """Long stories repeat their gifts, so every form of question has older matches with other answers."""
    for seed in range(60):
        story, asked = tell(Draws(generator(seed)), "qa5", 60, 8)
        assert [solve("\n".join(story), question.text) for question in asked] == [q.answer for q in asked]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**40), task=st.sampled_from(TASKS), length=st.integers(330, 3000))
def test_a_prompt_has_an_exact_length_and_is_the_book_between_the_facts(seed: int, task: str, length: int) -> None:
    sample = Babilong().sample(BYTES, {"task": task, "length": length}, 1, seed)
    text = text_of(sample.input_ids)
    ((start, end),) = answer_spans(sample.labels)
    assert (start, end) == (length, len(text)) and text[start:] == sample.target and text[start - 1] == " "
    body = text[: text.index("Question: ")]
    book = "\n".join(line for line in body.split("\n") if line not in facts(body))
    lines = "\n".join(line for line in sentences(HELD_OUT) if len(line) >= 10) + "\n"
    # From a random place on, and round to the start at the end of the book.
    assert book in lines + lines


def test_facts_are_spread_over_the_whole_book() -> None:
    places = []
    for index in range(200):
        text = text_of(Babilong(("qa4",)).sample(BYTES, {"task": "qa4", "length": 4096}, index, 3).input_ids)
        places += [text.index(fact) / 4096 for fact in facts(text)]
    # 400 places, about uniform over lines: the share in a quarter has a standard deviation of 0.022.
    share = np.histogram(places, bins=4, range=(0, 1))[0] / len(places)
    assert np.abs(share - 0.25).max() < 0.1


def test_exact_length_with_a_tokenizer_of_words() -> None:
    tokenizer = WordTokenizer()
    encode = PieceEncoder(tokenizer)
    for task in TASKS:
        for length in (160, 333, 1000):
            sample = Babilong().sample(encode, {"task": task, "length": length}, 1, 2)
            assert answer_spans(sample.labels).tolist() == [[length, length + 1]]
            text = tokenizer.decode(sample.input_ids)
            match = END.search(text)
            assert match and solve(text[: match.start()], match[1]) == match[2]
            assert tokenizer.decode(sample.input_ids[length:]) == " " + sample.target
        ids, labels = babilong_sequence(generator(length), encode, 300, (task,))
        assert len(ids) == len(labels) == 300


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), rows=st.integers(1, 3), length=st.integers(512, 900), questions=st.integers(1, 3))
def test_batch_and_sequence_follow_one_grammar(seed: int, rows: int, length: int, questions: int) -> None:
    batch = babilong_byte_batch(generator(seed), rows, length, questions=questions, encode=BYTES)
    single = babilong_sequence(generator(seed), BYTES, length, questions=questions)
    assert single[0].tolist() == batch[0][0].tolist()
    for ids, labels in [*zip(*batch, strict=True), single]:
        assert ids.shape == labels.shape == (length,) and ids.dtype == labels.dtype == np.int64
        text = "".join(map(chr, ids))
        found = list(END.finditer(text))
        assert len(found) == questions and found[-1].end() == length
        expected = np.full(length, IGNORE)
        for match in found:
            assert solve(text[: found[0].start()], match[1]) == match[2]
            expected[match.start(2) : match.end(2) + 1] = ids[match.start(2) : match.end(2) + 1]
        np.testing.assert_array_equal(labels, expected)


def test_the_beginning_of_text_opens_and_counts() -> None:
    opened = PieceEncoder(byte_tokenizer())
    sample = Babilong().sample(opened, {"task": "qa1", "length": 512}, 0, 0)
    assert sample.input_ids[0] == 256 and answer_spans(sample.labels)[0, 0] == 512
    closed = Babilong(opening=False).sample(opened, {"task": "qa1", "length": 512}, 0, 0)
    plain = Babilong().sample(BYTES, {"task": "qa1", "length": 512}, 0, 0)
    assert closed.input_ids.tolist() == plain.input_ids.tolist()
    ids, labels = babilong_sequence(generator(3), opened, 512)
    assert len(ids) == 512 and ids[0] == 256 and labels[0] == IGNORE


def test_same_seed_same_bytes_on_every_platform() -> None:
    # Recorded once. A change here changes every published number: it needs a new major version.
    digest = hashlib.sha256()
    for task in TASKS:
        sample = Babilong().sample(BYTES, {"task": task, "length": 700}, 3, 17)
        digest.update(sample.input_ids.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "5620a62f21075ff2"
    both = np.stack(babilong_byte_batch(generator(5), 8, 600, encode=BYTES)).astype("<i8").tobytes()
    assert hashlib.sha256(both).hexdigest()[:16] == "04e03bba3ff78c6c"


def test_a_short_book_is_gone_through_again() -> None:
    book = "The first sentence is this one. And the second one follows it! Does a third end the book?"
    text = text_of(Babilong(haystack=book).sample(BYTES, {"task": "qa4", "length": 900}, 0, 0).input_ids)
    body = text[: text.index("Question: ")]
    told = [line for line in body.split("\n") if line and line not in facts(body)]
    cycle = ["The first sentence is this one.", "And the second one follows it!", "Does a third end the book?"]
    first = cycle.index(told[1])
    assert len(told) > 8 and told[1:] == [cycle[(first + place) % 3] for place in range(len(told) - 1)]
    assert cycle[first - 1].endswith(told[0])


def test_sentences_that_could_be_taken_for_facts_are_left_out() -> None:
    book = (
        "Mr. Brown went to the kitchen with Dr. Grey. Alice went home in the rain. A lake lies north of the town.\n\n"
        '"Come in," said he. "It is late." They went\nto the garden.\f\nShort one.'
    )
    assert sentences(book) == [
        "Mr. Brown went to the kitchen with Dr. Grey.",
        '"Come in," said he.',
        '"It is late."',
        "They went to the garden.",
        "Short one.",
    ]
    assert len(tokenise(BYTES, "Tiny one. " + "A longer sentence stands here.").starts) == 1


@pytest.mark.parametrize("name", ["train", "held_out"])
def test_the_shipped_books_hold_nothing_of_the_stories(name: str) -> None:
    lines = sentences(shipped_text(name))
    assert facts("\n".join(lines)) == [] and len(lines) > 3000
    assert not any(line.startswith(("Question:", "Answer:")) for line in lines)


def test_a_batch_is_fast_enough_for_training() -> None:
    rng, best = generator(0), np.inf
    babilong_byte_batch(rng, 64, 512, encode=BYTES)
    for _ in range(5):
        start = time.process_time()
        babilong_byte_batch(rng, 64, 512, encode=BYTES)
        best = min(best, time.process_time() - start)
    # About 10 ms are usual on one core; the promise is well below 100 ms, on slow shared machines too.
    assert best < 0.05


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("kitchen.", True),
        (" Kitchen", True),
        ("She is in the kitchen. Or the garden.", True),
        ("kitchen\nQuestion: Where is the garden?", True),
        ("\n\nkitchen", True),
        ("garden.", False),
        ("kitchen or garden.", False),
        ("Not in the garden. In the kitchen.", False),
        ("kitchens.", False),
        ("", False),
        ("attic, then kitchen.", True),  # the attic stands in the question
    ],
)
def test_judging_follows_the_published_rule(said: str, right: bool) -> None:
    assert judge("qa3", "Where was the coin before the attic?", "kitchen", said) is right


def test_what_was_said_ends_at_a_sentence() -> None:
    task = Babilong()
    assert task.ended("kitchen.") and task.ended("kitchen\n") and not task.ended("\nkitch")


def test_cells() -> None:
    cells = Babilong(("qa1", "qa3")).cells([512, 1024])
    assert cells == [{"task": task, "length": length} for task in ("qa1", "qa3") for length in (512, 1024)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Babilong(("qa11",)), 'unknown task "qa11"; known tasks: qa1, qa2, qa3, qa4, qa5. Did you mean "qa1"'),
        (lambda: Babilong(()), "name at least one of qa1"),
        (lambda: Babilong(("qa2",), facts=(1, 4)), "2 <= fewest <= most, got (1, 4)"),
        (lambda: Babilong(("qa2",), facts=(5, 4)), "fewest <= most"),
        (lambda: Babilong(("qa4",), facts=(2, 5)), "at most 4 facts"),
        (lambda: Babilong(answer_tokens=0), "answer_tokens must be at least 1"),
        (
            lambda: Babilong().sample(BYTES, {"task": "qa3", "length": 200}, 0, 0),
            "length 200 is too short for qa3: 6 facts and 1 question(s) can take 251 tokens",
        ),
        (
            lambda: Babilong(haystack="Short.").sample(BYTES, {"task": "qa1", "length": 512}, 0, 0),
            "no sentence of 10 tokens or more",
        ),
        (lambda: babilong_byte_batch(generator(0), 0, 512), "rows must be at least 1"),
        (lambda: babilong_sequence(generator(0), BYTES, 512, questions=0), "questions must be at least 1"),
        (lambda: babilong_sequence(generator(0), BYTES, 512, ("qa0",)), 'unknown task "qa0"'),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        call()  # type: ignore[operator]


def test_the_stated_minimum_is_enough() -> None:
    for task in TASKS:
        with pytest.raises(UserError) as caught:
            Babilong().sample(BYTES, {"task": task, "length": 60}, 0, 0)
        found = re.search(r"can take (\d+) tokens", str(caught.value))
        assert found
        for index in range(50):
            sample = Babilong().sample(BYTES, {"task": task, "length": int(found[1])}, index, 0)
            assert len(facts(text_of(sample.input_ids))) == FACTS[task][0]
