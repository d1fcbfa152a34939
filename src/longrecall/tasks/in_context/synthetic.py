r"""In-context learning without data: small mappings from inputs to labels, which only the demonstrations explain.

A sample of ``parity`` with two demonstrations, ``|`` for a line feed; ``plum`` means even here, ``stone`` odd:

    384|plum|||71|stone|||906|          options: plum, stone          answer: plum

Which labels a sample uses and what each means are drawn anew, so nothing learnt before helps; the words are drawn
syllable by syllable. The classes of the demonstrations are as even as their number allows, in random order. The input
that is asked for is new, except in ``lexicon``, whose words have no other meaning than the one shown.

mapping          classes  the label tells
---------------  -------  ------------------------------------------------------------------
`first_letter`   2        whether the word begins with a vowel
`word_length`    2        whether the word has two syllables or four
`parity`         2        whether the number is even
`larger`         2        which of two numbers is larger
`lexicon`        2        the mood of the one sentiment word, of a lexicon made for the sample
`category`       3        to which of three made-up families, told by its ending, the word belongs

Source of the form: Min et al. 2022; the mappings are this package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.babilong.world import Draws
from longrecall.tasks.encoding import Cell, ChoiceSample, PieceEncoder, sample_generator
from longrecall.tasks.in_context.demonstrations import Demonstrations, Example
from longrecall.tasks.wording import Wording

LABELS = ("apple", "river", "stone", "cloud", "table", "green", "paper", "horse", "music", "winter", "silver", "bread")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_ENDINGS = ("ox", "ul", "ish")
_FRAMES = ("the film was {}", "we found the meal {}", "her new book is {}", "a {} trip", "they called it {}")
_LEXICON = 4
"""Words of each mood."""

Draw = Callable[[Draws, int], str]
"""Draws an input of the class with this number."""


def _syllables(draws: Draws, count: int) -> str:
    return "".join(draws.choice(_CONSONANTS) + draws.choice(_VOWELS) for _ in range(count))


def _first_letter(draws: Draws, kind: int) -> str:
    return (draws.choice(_VOWELS) if kind else "") + _syllables(draws, 2 + draws.below(2))


def _word_length(draws: Draws, kind: int) -> str:
    return _syllables(draws, 4 if kind else 2)


def _parity(draws: Draws, kind: int) -> str:
    return str(10 + 2 * draws.below(495) + kind)


def _larger(draws: Draws, kind: int) -> str:
    low = 10 + draws.below(889)
    high = low + 1 + draws.below(999 - low)
    return f"{low} {high}" if kind else f"{high} {low}"


def _category(draws: Draws, kind: int) -> str:
    return _syllables(draws, 2)[:-1] + _ENDINGS[kind]


def _lexicon(draws: Draws) -> list[list[str]]:
    words: list[str] = []
    while len(words) < 2 * _LEXICON:
        word = _syllables(draws, 3)
        if word not in words:
            words.append(word)
    return [words[:_LEXICON], words[_LEXICON:]]


_RULES: dict[str, tuple[int, Draw]] = {
    "first_letter": (2, _first_letter),
    "word_length": (2, _word_length),
    "parity": (2, _parity),
    "larger": (2, _larger),
    "category": (3, _category),
}
"""Mapping -> (classes, how an input of a class is drawn)."""

MAPPINGS = (*_RULES, "lexicon")


def class_count(mapping: str) -> int:
    """Return how many labels a sample of `mapping` has; 1 / this is chance."""
    return 2 if mapping == "lexicon" else _RULES[mapping][0]


def _shuffled(draws: Draws, values: Sequence[int]) -> list[int]:
    """Return `values` in random order (Fisher and Yates)."""
    order = list(values)
    for last in range(len(order) - 1, 0, -1):
        other = draws.below(last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def _inputs(draws: Draws, mapping: str, kinds: Sequence[int], asked: int) -> tuple[list[str], str]:
    """Return the inputs of the demonstrations, whose classes are `kinds`, and the input asked for, of class `asked`."""
    if mapping == "lexicon":
        lexicon = _lexicon(draws)
        words = [draws.choice(lexicon[kind]) for kind in kinds]
        shown = [draws.choice(_FRAMES).format(word) for word in words]
        # Another sentence around a word that was shown; a mood that was not shown leaves any word of its kind.
        known = [word for word, kind in zip(words, kinds, strict=True) if kind == asked] or lexicon[asked]
        word = draws.choice(known)
        frames = [frame for frame in _FRAMES if frame.format(word) not in shown] or list(_FRAMES)
        return shown, draws.choice(frames).format(word)
    draw = _RULES[mapping][1]
    shown = [draw(draws, kind) for kind in kinds]
    new = draw(draws, asked)
    while new in shown:
        new = draw(draws, asked)
    return shown, new


@dataclass(frozen=True)
class InContext:
    """The evaluation task: cells ``{"mapping", "shots"}``, one choice per sample.

    `mappings`: of the table above. `shots`: demonstrations before the question. `opening`: begin the prompt with the
    tokenizer's beginning-of-text token, where it has one. Lengths are not used: the prompt is as long as its examples.
    """

    mappings: tuple[str, ...] = MAPPINGS
    shots: tuple[int, ...] = (8, 16, 24)
    opening: bool = True

    name: ClassVar[str] = "in_context"
    wording: ClassVar[Wording] = Wording(
        "made-up mappings",
        "The model sees some inputs with their labels, whose meaning is drawn anew each time, and must find "
        "the label of a new input.",
    )
    version: ClassVar[int] = 1
    choices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the options before anything runs."""
        if not self.mappings or not self.shots:
            raise UserError(f"in_context: give at least one mapping ({', '.join(MAPPINGS)}) and one number of shots")
        for mapping in self.mappings:
            if mapping not in MAPPINGS:
                raise UserError(
                    f'in_context: unknown mapping "{mapping}"; known mappings: {", ".join(MAPPINGS)}.'
                    + did_you_mean(mapping, MAPPINGS)
                )
        for shots in self.shots:
            if not 0 <= shots <= 256:
                raise UserError(f"in_context: shots must be between 0 and 256, got {shots}")

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        """Return the cells to run: every mapping with every number of demonstrations."""
        return [{"mapping": mapping, "shots": shots} for mapping in self.mappings for shots in self.shots]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return 1: one choice per sample."""
        return 1

    def examples(self, cell: Cell, index: int, seed: int) -> tuple[list[Example], Example]:
        """Return the demonstrations of sample `index` and the example that is asked for."""
        draws = Draws(sample_generator(seed, self.name, cell, index))
        mapping, shots = str(cell["mapping"]), int(cell["shots"])
        classes = class_count(mapping)
        labels = tuple(LABELS[place] for place in _shuffled(draws, range(len(LABELS)))[:classes])
        kinds = _shuffled(draws, [place % classes for place in range(shots)])
        asked = draws.below(classes)
        shown, new = _inputs(draws, mapping, kinds, asked)
        options = tuple(sorted(labels))
        demonstrations = [Example(text, labels[kind], options) for text, kind in zip(shown, kinds, strict=True)]
        return demonstrations, Example(new, labels[asked], options)

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> ChoiceSample:
        """Return sample `index` of `cell`; the same bytes for the same arguments on every platform."""
        shown, asked = self.examples(cell, index, seed)
        joined = Demonstrations(encode, opening=self.opening)
        return joined.sample(joined.prefix(shown), asked, first=not shown)
