r"""What in-context tasks share: demonstrations, then an input whose output is to be chosen.

Two demonstrations and a question, with ``|`` for a line feed:

    bafo|plum|||rimu|stone|||gedo|
                                  ^ the options, "plum" and "stone", are scored from the last line feed on

An input and its output are joined by one line feed, examples by three; the line feed before an output belongs to the
output's tokens (Min et al. 2022, "Rethinking the Role of Demonstrations"), so it counts in the mean over its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.tasks.encoding import ChoiceSample, PieceEncoder

Ints = NDArray[np.int64]

_BETWEEN, _WITHIN = "\n\n\n", "\n"
_SPARE = 2
"""Tokens that the published cut keeps free beside input and output."""


@dataclass(frozen=True)
class Example:
    """An input, its output, and the options that the output is one of (empty: it only serves as a demonstration)."""

    input: str
    output: str
    options: tuple[str, ...] = ()


class Demonstrations:
    """Joins examples into prompts.

    `example_tokens`: an input is cut at its end so that it and its longest output leave two of these tokens free, as
    published; None leaves inputs whole. `opening`: begin with the tokenizer's beginning-of-text token.
    """

    def __init__(self, encode: PieceEncoder, example_tokens: int | None = None, opening: bool = True) -> None:
        self._encode, self._most = encode, example_tokens
        self._opening = encode.opening if opening else ()

    def _output(self, text: str) -> tuple[int, ...]:
        return self._encode(_WITHIN + text)

    def _input(self, text: str, first: bool, room_for: int) -> tuple[int, ...]:
        tokens = self._encode(text if first else _BETWEEN + text)
        if self._most is None:
            return tokens
        room = self._most - _SPARE - room_for
        if room < 1:
            raise UserError(
                f"in-context example: an output takes {room_for} of example_tokens {self._most}, which leaves no room "
                "for the input; raise example_tokens"
            )
        return tokens[:room]

    def prefix(self, shown: Sequence[Example]) -> tuple[int, ...]:
        """Return the tokens of the opening and the demonstrations."""
        tokens = list(self._opening)
        for place, example in enumerate(shown):
            output = self._output(example.output)
            tokens += self._input(example.input, place == 0, len(output)) + output
        return tuple(tokens)

    def sample(self, prefix: Sequence[int], asked: Example, first: bool, shared: bool = False) -> ChoiceSample:
        """Return the sample that asks for the output of `asked` after `prefix`.

        `first`: it shows no demonstration. `shared`: other samples have the same `prefix`.
        """
        options = tuple(np.array(self._output(option), dtype=np.int64) for option in asked.options)
        spoken = self._input(asked.input, first, max(map(len, options)))
        prompt = np.array([*prefix, *spoken], dtype=np.int64)
        if len(prompt) == 0:
            raise UserError(f"in-context example: the tokenizer makes no token of {asked.input!r}")
        answer = asked.options.index(asked.output)
        return ChoiceSample(prompt, options, answer, shared=len(prefix) if shared else 0)
