"""Passkey: both published forms, exact lengths, depths, labels, bad input."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.tasks import IGNORE, Passkey, PieceEncoder, answer_spans, passkey_byte_batch, passkey_sequence
from longrecall.tasks.passkey import FORMS
from tests.conftest import PlainBytes

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
NEEDLE = len("The pass key is . Remember it.  is the pass key.\n")  # without the two mentions of the key
BYTES = PieceEncoder(PlainBytes())


class WordTokenizer:
    """One token per word with the space before it; digits are merged in pairs."""

    def __init__(self) -> None:
        self.pieces: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [
            self.pieces.setdefault(piece, len(self.pieces))
            for piece in re.findall(r" ?[0-9]{1,2}| ?[A-Za-z]+|\s|.", text)
        ]

    def decode(self, ids: np.ndarray) -> str:
        spelled = {token: piece for piece, token in self.pieces.items()}
        return "".join(spelled[int(token)] for token in ids)


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def parse(text: str, form: str, digits: int) -> re.Match[str]:
    before, suffix = FORMS[form]
    match = re.fullmatch(
        re.escape(before)
        + r"(?P<first>[^\n]*\n)??"
        + rf"(?P<ahead>(?:{re.escape(NOISE)})*)"
        + rf"The pass key is (?P<key>[0-9]{{{digits}}})\. "
        + rf"Remember it\. (?P<again>[0-9]{{{digits}}}) is the pass key\.\n"
        + r"(?P<rest>(?:[^\n]*\n)??)"
        + rf"(?P<behind>(?:{re.escape(NOISE)})*)"
        + re.escape(suffix)
        + rf" (?P<answer>[0-9]{{{digits}}})",
        text,
    )
    assert match, text
    cut = (match["first"] or "") + match["rest"]
    assert NOISE.endswith(cut)
    assert match["key"] == match["again"] == match["answer"]
    return match


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    form=st.sampled_from(sorted(FORMS)),
    digits=st.integers(1, 7),
    depth=st.floats(0, 1),
    extra=st.integers(0, 700),
)
def test_sample_is_the_published_form_at_an_exact_length(
    seed: int, form: str, digits: int, depth: float, extra: int
) -> None:
    length = NEEDLE + 2 * digits + sum(map(len, FORMS[form])) + 1 + extra
    sample = Passkey((depth,), digits, form).sample(BYTES, {"length": length, "depth": depth}, 0, seed)
    assert len(sample.input_ids) == length + digits
    match = parse(bytes(sample.input_ids.astype(np.uint8)).decode(), form, digits)
    assert answer_spans(sample.labels).tolist() == [[length, length + digits]]
    assert sample.labels[length:].tolist() == list(match["answer"].encode())
    lines = -(-extra // len(NOISE))
    ahead = (match["first"] is not None) + len(match["ahead"]) // len(NOISE)
    # The needle stands at the line nearest to the depth asked for: half a line away at most.
    assert abs(ahead - depth * lines) <= 0.5


def test_depths_0_and_1_are_first_and_last() -> None:
    task = Passkey()
    first = bytes(task.sample(BYTES, {"length": 700, "depth": 0.0}, 0, 0).input_ids.astype(np.uint8)).decode()
    last = bytes(task.sample(BYTES, {"length": 700, "depth": 1.0}, 0, 0).input_ids.astype(np.uint8)).decode()
    assert first.startswith("The pass key is")
    assert re.search(r"is the pass key\.\nWhat is the pass key\?", last)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_exact_length_with_a_tokenizer_that_merges(form: str) -> None:
    tokenizer = WordTokenizer()
    encode = PieceEncoder(tokenizer)
    for length in (70, 97, 200):
        sample = Passkey(form=form).sample(encode, {"length": length, "depth": 0.5}, 1, 2)
        ((start, end),) = answer_spans(sample.labels)
        assert start == length
        match = parse(tokenizer.decode(sample.input_ids), form, 5)
        assert tokenizer.decode(sample.labels[start:end]) == " " + match["answer"]
        ids, labels = passkey_sequence(generator(length), encode, length, form=form)
        assert len(ids) == len(labels) == length
        parse(tokenizer.decode(ids), form, 5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 5),
    form=st.sampled_from(sorted(FORMS)),
    digits=st.integers(1, 6),
    extra=st.integers(0, 600),
    label_needle=st.booleans(),
)
def test_batch_and_sequence_follow_one_grammar(
    seed: int, rows: int, form: str, digits: int, extra: int, label_needle: bool
) -> None:
    length = NEEDLE + 3 * digits + sum(map(len, FORMS[form])) + 1 + extra
    batch = passkey_byte_batch(generator(seed), rows, length, digits, form, label_needle)
    single = passkey_sequence(generator(seed), BYTES, length, digits, form, label_needle)
    for ids, labels in [*zip(*batch, strict=True), single]:
        assert ids.shape == labels.shape == (length,)
        match = parse(bytes(ids.astype(np.uint8)).decode(), form, digits)
        expected = np.full(length, IGNORE)
        for group in ("answer", "again") if label_needle else ("answer",):
            expected[match.start(group) : match.end(group)] = ids[match.start(group) : match.end(group)]
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_beginning_of_text_opens_every_prompt_and_counts(form: str) -> None:
    opened = PieceEncoder(byte_tokenizer())
    for depth in (0.0, 0.5, 1.0):
        cell, shorter = {"length": 512, "depth": depth}, {"length": 511, "depth": depth}
        sample = Passkey((depth,), form=form).sample(opened, cell, 0, 0)
        assert sample.input_ids[0] == 256 and answer_spans(sample.labels).tolist() == [[512, 517]]
        parse(bytes(sample.input_ids[1:].astype(np.uint8)).decode(), form, 5)
        closed = Passkey((depth,), form=form, opening=False).sample(opened, shorter, 0, 0)
        plain = Passkey((depth,), form=form).sample(BYTES, shorter, 0, 0)
        assert closed.input_ids.tolist() == plain.input_ids.tolist()
    ids, labels = passkey_sequence(generator(3), opened, 512, form=form)
    plain_ids, plain_labels = passkey_sequence(generator(3), BYTES, 511, form=form)
    assert ids.tolist() == [256, *plain_ids] and labels.tolist() == [IGNORE, *plain_labels]


def test_training_depths_reach_every_line() -> None:
    ids, _ = passkey_byte_batch(generator(0), 300, 512)
    text = [bytes(row.astype(np.uint8)).decode() for row in ids]
    places = {row.index("The pass key is") for row in text}
    # 512 - 97 (needle, question, space) - 5 = 414 bytes of noise: 4 whole lines and a cut one, so 6 places.
    assert len(places) == 6
    assert len({row[-5:] for row in text}) > 290  # 300 draws of 100 000 keys: 0.45 repeats are expected


def test_same_seed_same_bytes_on_every_platform() -> None:
    sample = Passkey().sample(BYTES, {"length": 512, "depth": 0.25}, 3, 17)
    # Recorded once. A change here changes every published number: it needs a new major version.
    assert hashlib.sha256(sample.input_ids.astype("<i8").tobytes()).hexdigest()[:16] == "b27f545f04d36206"


def test_whole_and_fractional_depths_make_one_cell() -> None:
    assert Passkey((0, 1)).cells([512]) == Passkey((0.0, 1.0)).cells([512])
    assert isinstance(Passkey((0, 1)).cells([512])[0]["depth"], float)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Passkey().sample(BYTES, {"length": 96, "depth": 0.5}, 0, 0),
            "length 96 is too short: the needle and the question alone take 97 tokens",
        ),
        (lambda: passkey_byte_batch(generator(0), 1, 101), "too short"),
        (lambda: passkey_byte_batch(generator(0), 0, 512), "rows must be at least 1"),
        (lambda: passkey_sequence(generator(0), BYTES, 20), "too short"),
        (lambda: Passkey(form="statx"), 'Did you mean "statex"?'),
        (lambda: Passkey(depths=(1.5,)), "between 0 and 1"),
        (lambda: Passkey(depths=(float("nan"),)), "between 0 and 1"),
        (lambda: Passkey(depths=()), "at least one depth"),
        (lambda: Passkey(digits=0), "at least 1"),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        call()  # type: ignore[operator]
