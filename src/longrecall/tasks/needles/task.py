r"""Needles in a haystack: RULER's eight tasks, for any tokenizer, without a network.

One sentence with a key and a value stands somewhere in a long text; the question names the key. A niah_single_1 sample
of 600 bytes, its noise shortened (``|`` is a line feed):

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.|The grass is green. [...] There and back again.|One of the special magic numbers for
    brisk-harbor is: 4820197.|The grass is green. [...]|What is the special magic number for brisk-harbor mentioned in
    the provided text? The special magic number for brisk-harbor mentioned in the provided text is 4820197

    input   i s _ 4 8 2 0 1 9 7
    label   . . . 4 8 2 0 1 9 7

| task | haystack | keys hidden | values of a key | keys asked | key / value |
|---|---|---|---|---|---|
| single_1 | one noise line, repeated | 1 | 1 | 1 | words / number |
| single_2 | essay | 1 | 1 | 1 | words / number |
| single_3 | essay | 1 | 1 | 1 | words / UUID |
| multikey_1 | essay | 4 | 1 | 1 | words / number |
| multikey_2 | other needles | 1 and the haystack's | 1 | 1 | words / number |
| multikey_3 | other needles | 1 and the haystack's | 1 | 1 | UUID / UUID |
| multivalue | essay | 1 | 4 | 1 | words / number |
| multiquery | essay | 4 | 1 | 4 | words / number |

The length holds prompt and answer: `answer_tokens` of it (128 as published, but never more than a quarter) are left for
what the model says. The haystack is whole sentences (or lines) from its beginning, as many as fit; `GradedSample.fill`
says how much of the length is used. RULER's own text grows by 500 words at a time, and never ends at short lengths.

Source: RULER (Hsieh et al. 2024). Its essays may not be passed on: the text is a public-domain book or the user's, and
cells say which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from longrecall.errors import UserError
from longrecall.tasks.declaration import (
    Declaration,
    HarnessForm,
)
from longrecall.tasks.encoding import (
    IGNORE,
    Cell,
    CellValue,
    GradedSample,
    PieceEncoder,
    QuestionSample,
    sample_generator,
)
from longrecall.tasks.needles.grading import HIGHEST_GRADES, contained, prefix_score
from longrecall.tasks.needles.haystack import (
    Places,
    essay_body,
    needles_body,
    noise_body,
    published_depths,
)
from longrecall.tasks.needles.pieces import Frame, Ints, array, essay
from longrecall.tasks.needles.wording import KINDS, Kind, draw_distinct, draw_keys, draw_values
from longrecall.tasks.text import shipped_text
from longrecall.tasks.wording import Wording, length_place

_HARNESS = HarnessForm(128, metrics=("accuracy", "contains", "prefix_score"))


@dataclass(frozen=True)
class Needles:
    """What the eight tasks share: cells ``{"length"}``, with `depths` ``{"length", "depth"}``.

    `depths`: shares of the lines or sentences that stand before the needle that is asked for, in [0, 1]; empty as
    published, where each sample draws its own. `haystack`: the essay (None: the shipped held-out book); cells call it
    ``"public-domain"`` or ``"own"``. `repeat`: go through an essay again that is too short, as published; otherwise
    refuse. `opening`: begin with the tokenizer's beginning-of-text token, which counts in the length. `answer_tokens`:
    how many tokens the model may say. `shortest_prefix`: the fewest characters that count for the prefix score.

    Metrics: `accuracy` (every value that was asked for is said), ``contains`` (the share of them: RULER's score),
    ``prefix_score`` (0 to 5: RESONA's, the mean over values), and ``exact_match``.
    """

    depths: tuple[float, ...] = ()
    haystack: str | None = field(default=None, repr=False)
    repeat: bool = True
    opening: bool = True
    answer_tokens: int = 128
    shortest_prefix: int = 1

    name: ClassVar[str]
    declared: ClassVar[Declaration] = Declaration(text_option="haystack", harness=_HARNESS)
    version: ClassVar[int] = 1
    highest_grades: ClassVar[Mapping[str, float]] = HIGHEST_GRADES

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        for depth in self.depths:
            if not 0.0 <= depth <= 1.0:
                raise UserError(f"{self.name}: depth must be between 0 and 1, got {depth}")
        if self.depths and self._kind.answers > 1:
            raise UserError(
                f"{self.name}: depths place one needle, but {self._kind.answers} are asked for; leave them out"
            )
        if self.haystack is not None and self._kind.haystack != "essay":
            raise UserError(
                f"{self.name}: its haystack is generated, not read from a text ({self._kind.haystack}); leave the "
                "text out"
            )
        for option in ("answer_tokens", "shortest_prefix"):
            if getattr(self, option) < 1:
                raise UserError(f"{self.name}: {option} must be at least 1, got {getattr(self, option)}")

    @property
    def _kind(self) -> Kind:
        return KINDS[self.name]

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        """Return the cells to run: every length, at every depth where there are some."""
        label: dict[str, CellValue] = {}
        if self._kind.haystack == "essay":
            label["haystack"] = "public-domain" if self.haystack is None else "own"
        if not self.depths:
            return [{"length": length} | label for length in lengths]
        return [{"length": length, "depth": float(depth)} | label for length in lengths for depth in self.depths]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return 1: a sample counts once, however many values it asks for."""
        return 1

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> GradedSample:
        """Return sample `index` of `cell`; the same bytes for the same arguments on every platform.

        Raises `UserError` when the length cannot hold needles and question (naming the least that can), when the
        tokenizer cannot represent a value, and without `repeat` when the text is too short.
        """
        kind, length = self._kind, int(cell["length"])
        frame = Frame(encode, kind, self.name, self.opening)
        self._check_length(frame, length)
        # Whose text it is has no say in what is drawn.
        drawn_from = {key: part for key, part in cell.items() if key != "haystack"}
        generator = sample_generator(seed, self.name, drawn_from, index)
        taken: set[str] = set()
        keys = draw_keys(generator, kind, kind.keys, taken)
        values = draw_values(generator, kind, kind.keys * kind.values)
        wanted = tuple(values[: kind.queries * kind.values])
        lead, answer = frame.answer(wanted)
        asked = frame.question(keys[: kind.queries], lead)
        room = length - self._reserved(length) - len(frame.before) - len(asked)
        owners = [key for key in keys for _ in range(kind.values)]
        body = self._body(generator, encode, frame, owners, values, taken, room, cell)
        prompt = np.concatenate((array(frame.before), body, array(asked)))
        ids = np.concatenate((prompt, array(answer)))
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        labels[len(prompt) :] = answer
        fill = (len(prompt) + self._reserved(length)) / length
        question = frame.asks(keys[: kind.queries])
        return GradedSample(ids, labels, question, ", ".join(wanted), references=wanted, fill=fill)

    def ended(self, said: str) -> bool:
        """Return False: as published, a value counts wherever it is said."""
        return False

    def settled(self, sample: QuestionSample, said: str) -> bool:
        """Return whether every value has been said: more words take nothing away."""
        return contained(sample.accepted, said) == 1.0

    def judge(self, cell: Cell, sample: QuestionSample, said: str) -> bool:
        """Return whether `said` contains every value that was asked for."""
        return contained(sample.accepted, said) == 1.0

    def grades(self, cell: Cell, sample: QuestionSample, said: str) -> dict[str, float]:
        """Return RULER's score (0 to 1) and RESONA's (0 to 5) of what the model said."""
        prefixes = [prefix_score(value, said, self.shortest_prefix) for value in sample.accepted]
        return {"contains": contained(sample.accepted, said), "prefix_score": sum(prefixes) / len(prefixes)}

    def _reserved(self, length: int) -> int:
        return min(self.answer_tokens, length // 4)

    def _check_length(self, frame: Frame, length: int) -> None:
        least = smallest = frame.smallest()
        while least - self._reserved(least) < smallest:
            least += smallest - (least - self._reserved(least))
        if length < least:
            raise UserError(
                f"{self.name}: length {length} is too short: needles, question and {self._reserved(least)} tokens for "
                f"the answer need {least} tokens with this tokenizer"
            )

    def _body(
        self,
        generator: np.random.Generator,
        encode: PieceEncoder,
        frame: Frame,
        keys: Sequence[str],
        values: Sequence[str],
        taken: set[str],
        room: int,
        cell: Cell,
    ) -> Ints:
        """Return the haystack with its needles, at most `room` tokens."""
        kind, plain = self._kind, frame.needles(keys, values, spaced=False)
        places = self._places(generator, len(plain), cell)
        if kind.haystack == "noise":
            return noise_body(encode, plain, room, places)
        if kind.haystack == "needles":
            return needles_body(generator, frame, kind, plain, taken, room, places)
        text = essay(encode, shipped_text("held_out") if self.haystack is None else self.haystack)
        body, sentences = essay_body(text, plain, frame.needles(keys, values, spaced=True), room, places)
        if sentences > text.sentences and not self.repeat:
            raise UserError(
                f"{self.name}: the haystack has {len(text.tokens)} tokens, too few for a length of {cell['length']}; "
                "give a longer text, or let it repeat (repeat=true)"
            )
        return body

    def _places(self, generator: np.random.Generator, needles: int, cell: Cell) -> Places:
        """Return where needles go among n lines: the one that is asked for, which is the first, at the cell's depth."""
        given = cell.get("depth")
        percent = published_depths(generator, needles) if self._kind.haystack == "essay" else []

        def at(lines: int) -> list[int]:
            if percent:
                drawn = [lines * depth // 100 for depth in percent]
            elif lines >= needles:
                drawn = draw_distinct(generator, lines, needles)
            else:
                drawn = [0] * needles
            return drawn if given is None else [int(float(given) * lines + 0.5), *drawn[1:]]

        return at


class NiahSingle1(Needles):
    """One needle with a number in a noise line that repeats."""

    name: ClassVar[str] = "niah_single_1"
    declared: ClassVar[Declaration] = Declaration(harness=_HARNESS)
    wording: ClassVar[Wording] = Wording(
        "one needle in noise",
        "One number is hidden in a long text of one repeated line; the model is asked for it.",
        length_place,
    )


class NiahSingle2(Needles):
    """One needle with a number in an essay."""

    name: ClassVar[str] = "niah_single_2"
    wording: ClassVar[Wording] = Wording(
        "one needle in an essay",
        "One number is hidden in a long essay; the model is asked for it.",
        length_place,
    )


class NiahSingle3(Needles):
    """One needle with a UUID in an essay."""

    name: ClassVar[str] = "niah_single_3"
    wording: ClassVar[Wording] = Wording(
        "one long needle in an essay",
        "One code of 36 characters is hidden in a long essay; the model is asked for it.",
        length_place,
    )


class NiahMultikey1(Needles):
    """Four needles with different keys in an essay; one is asked for."""

    name: ClassVar[str] = "niah_multikey_1"
    wording: ClassVar[Wording] = Wording(
        "one of four needles",
        "Four numbers with different names are hidden in a long essay; the model is asked for one of them.",
        length_place,
    )


class NiahMultikey2(Needles):
    """One needle among needles with other keys."""

    name: ClassVar[str] = "niah_multikey_2"
    declared: ClassVar[Declaration] = Declaration(harness=_HARNESS)
    wording: ClassVar[Wording] = Wording(
        "a needle among needles",
        "The whole text is made of sentences that each give a name its number; the model is asked for one of them.",
        length_place,
    )


class NiahMultikey3(Needles):
    """One needle among needles with other keys; keys and values are UUIDs."""

    name: ClassVar[str] = "niah_multikey_3"
    declared: ClassVar[Declaration] = Declaration(harness=_HARNESS)
    wording: ClassVar[Wording] = Wording(
        "a long needle among needles",
        "The whole text is made of sentences that each give a code its own code; the model is asked for one of them.",
        length_place,
    )


class NiahMultivalue(Needles):
    """Four values of one key in an essay; all are asked for."""

    name: ClassVar[str] = "niah_multivalue"
    wording: ClassVar[Wording] = Wording(
        "four values of one needle",
        "Four numbers with the same name are hidden in a long essay; the model must give them all.",
        length_place,
    )


class NiahMultiquery(Needles):
    """Four keys with a value each in an essay; all are asked for."""

    name: ClassVar[str] = "niah_multiquery"
    wording: ClassVar[Wording] = Wording(
        "four needles at once",
        "Four numbers with different names are hidden in a long essay; the model must give them all.",
        length_place,
    )


TASKS: tuple[type[Needles], ...] = (
    NiahSingle1,
    NiahSingle2,
    NiahSingle3,
    NiahMultikey1,
    NiahMultikey2,
    NiahMultikey3,
    NiahMultivalue,
    NiahMultiquery,
)
