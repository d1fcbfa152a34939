r"""Passkey retrieval in its two published forms: one key hidden in repeated lines, asked for at the end.

The end of a sample with the key 04217, bytes as tokens (``_`` is a space, ``.`` a label of -100); the prompt is
everything up to and including the space:

    input   T h e _ p a s s _ k e y _ i s _ 0 4 2 1 7
    label   . . . . . . . . . . . . . . . . 0 4 2 1 7

Forms:

* ``statex`` (StateX, table 12): noise lines with the needle line among them, then
  ``What is the pass key? The pass key is``.
* ``infinitebench`` (InfiniteBench): a preamble announces that something is hidden; the question and the beginning of
  the answer stand in paragraphs of their own.

The haystack is filled to an exact number of tokens: whole noise lines, and before them the last tokens of one more
line, so that each line but the first is whole. `depth` is the share of these lines that stands before the needle:
0 = first, 1 = last. Unless `opening` is false, the tokenizer's beginning-of-text token, where it has one, stands before
everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks import declaration as declare
from longrecall.tasks.charts import MeanChart, ShareMap, TaskSection
from longrecall.tasks.encoding import (
    IGNORE,
    ByteEncoder,
    Cell,
    GradedSample,
    PieceEncoder,
    QuestionSample,
    Sample,
    TextEncoder,
    draw_integers,
    sample_generator,
)
from longrecall.tasks.needles.grading import HIGHEST_GRADES, found, prefix_score
from longrecall.tasks.wording import Wording, length_place
from longrecall.units import format_length
from longrecall.value_rules import check_weight, one_of, positive

Ints = NDArray[np.int64]

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_ANNOUNCEMENT = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n\n"
)
_NEEDLE = ("The pass key is", ". Remember it.", " is the pass key.\n")
"""What stands before, between and after the two mentions of the key."""

FORMS: dict[str, tuple[str, str]] = {
    "statex": ("", "What is the pass key? The pass key is"),
    "infinitebench": (_ANNOUNCEMENT, "\nWhat is the pass key?\n\nThe pass key is"),
}
"""Form -> (text before the haystack, text between the haystack and the answer)."""


def _check_options(form: str, digits: int) -> None:
    if form not in FORMS:
        raise UserError(f'passkey: unknown form "{form}"; known forms: {", ".join(FORMS)}.{did_you_mean(form, FORMS)}')
    if digits < 1:
        raise UserError(f"passkey: digits must be at least 1, got {digits}")


def _check_depth(depth: float) -> None:
    if not 0.0 <= depth <= 1.0:
        raise UserError(f"passkey: depth must be between 0 and 1, got {depth}")


@dataclass(frozen=True)
class _Frame:
    """A prompt without its haystack: int64 tokens, and which tokens of the needle belong to the key's mentions."""

    before: Ints
    needle: Ints
    mention: NDArray[np.int8]  # per needle token: 0 none, 1 first mention of the key, 2 second
    suffix: Ints  # question, answer prefix and, where it is a token of its own, the space before the key
    answer: Ints
    noise: Ints

    @property
    def smallest(self) -> int:
        """The tokens of a prompt without noise."""
        return len(self.before) + len(self.needle) + len(self.suffix)

    def room(self, length: int) -> int:
        """Return the noise tokens of a prompt of `length`; refuse a length that cannot hold needle and question."""
        if length < self.smallest:
            raise UserError(
                f"passkey: length {length} is too short: the needle and the question alone take {self.smallest} tokens"
            )
        return length - self.smallest


def _frame(encode: PieceEncoder, key: str, form: str, opening: bool) -> _Frame:
    before, suffix = FORMS[form]
    lead, answer = encode.answer(key)
    needle: list[int] = []
    mention: list[int] = []
    for index, piece in enumerate(_NEEDLE):
        tokens = encode(piece)
        needle.extend(tokens)
        mention.extend([0] * len(tokens))
        if index < 2:
            needle.extend(lead + answer)
            mention.extend([0] * len(lead) + [index + 1] * len(answer))
    return _Frame(
        before=_array((encode.opening if opening else ()) + (encode(before) if before else ())),
        needle=_array(needle),
        mention=np.array(mention, dtype=np.int8),
        suffix=_array(encode(suffix) + lead),
        answer=_array(answer),
        noise=_array(encode(_NOISE)),
    )


def _array(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, dtype=np.int64)


def _lines(room: int, line: int) -> int:
    """Return how many lines, the cut one included, a haystack of `room` tokens has."""
    return -(-room // line)


def _assemble(frame: _Frame, length: int, lines_before: int, label_needle: bool) -> tuple[Ints, Ints]:
    """Return ids and labels of a prompt of `length` tokens and its answer."""
    room, line = frame.room(length), len(frame.noise)
    split = max(0, room - (_lines(room, line) - lines_before) * line) if lines_before else 0
    # Read backwards from its end, the haystack is whole lines; only its first line is cut.
    haystack = np.tile(frame.noise, _lines(room, line))[_lines(room, line) * line - room :]
    parts = [frame.before, haystack[:split], frame.needle, haystack[split:], frame.suffix, frame.answer]
    ids = np.concatenate(parts)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[length:] = frame.answer
    if label_needle:
        start = len(frame.before) + split
        second = start + np.flatnonzero(frame.mention == 2)
        labels[second] = ids[second]
    return ids, labels


def _draw_key(generator: np.random.Generator, digits: int) -> str:
    return "".join(str(digit) for digit in draw_integers(generator, 10, (digits,)))


def passkey_sequence(
    generator: np.random.Generator,
    tokenizer: TextEncoder | PieceEncoder,
    length: int,
    digits: int = 5,
    form: str = "statex",
    label_needle: bool = False,
    opening: bool = True,
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), int64 [length] each: one training sequence, the answer included.

    `opening`: begin with the tokenizer's beginning-of-text token, which counts in `length`.
    The needle stands after a uniformly drawn number of noise lines. Labelled are the tokens of the answer and, with
    `label_needle`, of the key's second mention inside the needle, which a model can already copy from the first.
    """
    _check_options(form, digits)
    encode = tokenizer if isinstance(tokenizer, PieceEncoder) else PieceEncoder(tokenizer)
    frame = _frame(encode, _draw_key(generator, digits), form, opening)
    prompt = length - len(frame.answer)
    lines = _lines(frame.room(prompt), len(frame.noise))
    return _assemble(frame, prompt, int(draw_integers(generator, lines + 1, ())[()]), label_needle)


def passkey_byte_batch(
    generator: np.random.Generator,
    rows: int,
    length: int,
    digits: int = 5,
    form: str = "statex",
    label_needle: bool = False,
) -> tuple[Ints, Ints]:
    """Return (input_ids, labels), both int64 [rows, length]: `passkey_sequence` over bytes, all rows at once.

    There is no beginning-of-text token: that is for the caller to put in front.
    """
    _check_options(form, digits)
    if rows < 1:
        raise UserError(f"passkey: rows must be at least 1, got {rows}")
    # Bytes above 127 cannot occur in the text, so they mark where each digit of the key belongs.
    marks = np.arange(digits, dtype=np.int64) + 128
    blank = _frame(PieceEncoder(ByteEncoder()), "0" * digits, form, opening=False)
    needle = blank.needle.copy()
    for mention in (1, 2):
        needle[blank.mention == mention] = marks
    frame = _Frame(blank.before, needle, blank.mention, blank.suffix, marks, blank.noise)
    lines = _lines(frame.room(length - digits), len(frame.noise))
    lines_before = draw_integers(generator, lines + 1, (rows,))
    keys = draw_integers(generator, 10, (rows, digits)) + ord("0")

    used, which = np.unique(lines_before, return_inverse=True)
    templates = [_assemble(frame, length - digits, int(count), label_needle) for count in used]
    ids = np.stack([template for template, _ in templates])[which]
    scored = np.stack([labels != IGNORE for _, labels in templates])[which]
    row, column = np.nonzero(ids >= 128)
    ids[row, column] = keys[row, ids[row, column] - 128]
    return ids, np.where(scored, ids, IGNORE)


@dataclass(frozen=True)
class PasskeySource(declare.TrainingSource):
    """Passkey prompts made on the fly; only the key is labelled."""

    kind: ClassVar[str] = "passkey"

    digits: int = 5
    """Digits of the key."""
    form: str = "statex"
    """statex or infinitebench."""
    label_needle: bool = False
    """Also label the key's second mention inside the needle."""
    weight: float = 1.0
    """Sequences from here, relative to the other sources."""

    def __post_init__(self) -> None:
        """Check the fields before anything runs."""
        check_weight(self.weight)
        positive(self, "digits")
        one_of("form", self.form, ("statex", "infinitebench"))

    def sequences(self, pieces: PieceEncoder) -> declare.Make:
        """Return the function that makes a training sequence."""
        return lambda generator, length: passkey_sequence(
            generator, pieces, length, self.digits, self.form, self.label_needle
        )


def _headlines(cells: Sequence[Mapping[str, Any]]) -> list[declare.Headline]:
    longest = max(cell["length"] for cell in cells)
    hardest = f"pass key: accuracy at {format_length(int(longest))} tokens"
    return [declare.Headline("pass key: accuracy, all cells"), declare.Headline(hardest, part={"length": longest})]


_FLAGS = (
    declare.Flag("--depths", "depths", "X,...", "places of the key", float),
    declare.Flag("--form", "form", "F", "statex or infinitebench", str),
    declare.Flag("--key-digits", "digits", "N", "digits of a key"),
)


_BY_LENGTH = MeanChart(
    name="passkey-length",
    along="length",
    axis="length in tokens",
    share="share recalled",
    table="Pass key by length, mean over depths",
    title="Passkey: share of keys recalled by length, mean over depths, a line per result file",
    caption="Share of pass keys recalled by length of the text, mean over depths. Bars are 95% intervals.",
    reading="How to read it: where a line falls, the text has grown too long for the key to be found again.",
)
_BY_DEPTH = ShareMap(
    name="passkey-map",
    along="length",
    rows="depth",
    axes=("length in tokens", "depth of the needle"),
    keys=("length", "depth"),
    row_text="{:.0%}".format,
    title="Pass key: share of keys recalled by length of the text and depth of the needle",
    caption="The same by depth, in percent: 0% is the beginning of the text, the farthest from the question.",
    reading="How to read it: the stronger the colour, the more is recalled; a map that fades to its top right forgets "
    "early text.",
)
_SECTION = TaskSection("Pass key by length and depth", (_BY_LENGTH, _BY_DEPTH))


@dataclass(frozen=True)
class Passkey:
    """The evaluation task: cells ``{"length", "depth"}``, one key per sample.

    A prompt has exactly `length` tokens, the needle and the question included and the answer excluded. `depths` are
    shares of the noise lines before the needle, in [0, 1]; `digits` independent digits make a key. `opening`: begin the
    prompt with the tokenizer's beginning-of-text token, where it has one; it counts in `length`.
    """

    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    digits: int = 5
    form: str = "statex"
    opening: bool = True

    name: ClassVar[str] = "passkey"
    wording: ClassVar[Wording] = Wording(
        "pass key",
        "One number is hidden in a long text that repeats the same few sentences; at the end the model is asked for "
        "it.",
        length_place,
    )
    declared: ClassVar[declare.Declaration] = declare.Declaration(
        flags=_FLAGS,
        source=PasskeySource,
        harness=declare.HarnessForm(16, ("\n",)),
        report=declare.ReportPart(("accuracy",), ("length", "depth"), headlines=_headlines, section=_SECTION),
    )
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        _check_options(self.form, self.digits)
        if not self.depths:
            raise UserError("passkey: give at least one depth")
        for depth in self.depths:
            _check_depth(depth)

    def cells(self, lengths: Sequence[int]) -> list[dict[str, int | float]]:
        """Return the cells to run: every length at every depth."""
        return [{"length": length, "depth": float(depth)} for length in lengths for depth in self.depths]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return how many answers a sequence of `cell` holds."""
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> Sample:
        """Return sample `index` of `cell`; the same bytes for the same arguments on every platform."""
        generator = sample_generator(seed, Passkey.name, cell, index)
        frame = _frame(encode, _draw_key(generator, self.digits), self.form, self.opening)
        length = int(cell["length"])
        lines = _lines(frame.room(length), len(frame.noise))
        # Half-way cases go up, as in school: Python's round() would send them to the even neighbour.
        return Sample(*_assemble(frame, length, int(float(cell["depth"]) * lines + 0.5), label_needle=False))


@dataclass(frozen=True)
class SpokenPasskey(Passkey):
    """The samples of `Passkey`, answered in the model's own words: up to `answer_tokens` tokens.

    `accuracy` is the source's of each form: the key stands anywhere in the answer (``statex``), or is the first run of
    digits in it (``infinitebench``). ``contains`` is the former for both, ``prefix_score`` RESONA's 0 to 5, in which
    prefixes of fewer than `shortest_prefix` digits count nothing.
    """

    answer_tokens: int = 32
    shortest_prefix: int = 1

    name: ClassVar[str] = "passkey_spoken"
    wording: ClassVar[Wording] = Wording(
        "pass key, spoken",
        "As the pass key, a number hidden in a long repeated text, but the model answers in its own words.",
        length_place,
    )
    declared: ClassVar[declare.Declaration] = declare.Declaration(flags=_FLAGS)
    highest_grades: ClassVar[Mapping[str, float]] = HIGHEST_GRADES

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        super().__post_init__()
        for option in ("answer_tokens", "shortest_prefix"):
            if getattr(self, option) < 1:
                raise UserError(f"passkey_spoken: {option} must be at least 1, got {getattr(self, option)}")

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> GradedSample:
        """Return sample `index` of `cell`, the same tokens as `Passkey` has.

        Raises `UserError` when the tokenizer does not give the key back: then no answer could ever be right.
        """
        same = super().sample(encode, cell, index, seed)
        key = _draw_key(sample_generator(seed, Passkey.name, cell, index), self.digits)
        tokens = encode.answer(key)[1]
        back = encode.spelled(tokens)
        if back is not None and key not in back:
            raise UserError(
                f'passkey_spoken: the tokenizer cannot represent the key "{key}": it turns it into {back!r}; use the '
                "tokenizer that belongs to the model"
            )
        return GradedSample(same.input_ids, same.labels, "What is the pass key?", key)

    def ended(self, said: str) -> bool:
        """Return False: the key may come late."""
        return False

    def settled(self, sample: QuestionSample, said: str) -> bool:
        """Return whether the key has been said and a first run of digits has come to its end."""
        return found(sample.target, said) and re.search("[0-9][^0-9]", said) is not None

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        """Return whether `said` is right by the rule of the form."""
        if self.form == "statex":
            return found(sample.target, said)
        first = re.search("[0-9]+", said)
        return first is not None and first[0] == sample.target

    def grades(self, cell: Cell, sample: QuestionSample, said: str) -> dict[str, float]:
        """Return whether `said` contains the key (0 or 1), and its score by prefix (0 to 5)."""
        score = prefix_score(sample.target, said, self.shortest_prefix)
        return {"contains": float(found(sample.target, said)), "prefix_score": score}
