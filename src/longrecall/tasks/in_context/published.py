"""In-context learning on published data: twelve data sets, 8 to 24 demonstrations, five draws of them.

Source: StateX, appendix C.3, after Min et al. (2022). The demonstrations of a draw are the same for all questions, so a
recurrent model reads them once: they are the `shared` tokens of a cell. Given the draw, questions are independent of
each other; what other demonstrations would change is seen between the draws.

Local files: a folder with ``<dataset>_train.jsonl`` and ``<dataset>_test.jsonl``, one object per line:

    {"input": "sentence: a joy to watch", "output": "positive", "options": ["negative", "positive"]}

``options`` may be missing in the training file. Other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.encoding import Cell, ChoiceSample, PieceEncoder, sample_generator
from longrecall.tasks.in_context.demonstrations import Demonstrations, Example
from longrecall.tasks.in_context.sources import SOURCES
from longrecall.tasks.rows import Rows, local_file, read_hub, read_jsonl, text_field, text_list
from longrecall.tasks.wording import Wording

DRAWS = (100, 13, 21, 42, 87)
"""The published seeds of the demonstrations."""


def parse_demonstration(row: Mapping[str, Any]) -> Example:
    """Return the example of a training row; raises `ValueError` with the reason when it is broken."""
    return Example(text_field(row, "input"), text_field(row, "output"))


def parse_question(row: Mapping[str, Any]) -> Example:
    """Return the example of a test row, options included; raises `ValueError` with the reason when it is broken."""
    example = Example(text_field(row, "input"), text_field(row, "output"), text_list(row, "options"))
    if len(set(example.options)) != len(example.options) or len(example.options) < 2:
        raise ValueError('"options" must be at least two different texts')
    if example.output not in example.options:
        raise ValueError(f'"output" {example.output!r} is not among the options')
    return example


class _Split(NamedTuple):
    train: Rows[Example]
    test: Rows[Example]


@dataclass(frozen=True)
class MetaICL:
    """The evaluation task: cells ``{"dataset", "shots", "draw"}``, one choice per sample.

    `datasets`: of the twelve, or any names with local files. `data`: the folder of local files; "" takes the hub.
    `shots`: demonstrations; `draws`: seeds that choose them, the first `shots` training rows in the order that numpy's
    frozen `RandomState(draw)` gives, as published. `example_tokens`: one example is cut to this many tokens, the
    input's end first (0: never). `skip_broken`: leave out broken rows and count them instead of stopping. `opening`:
    begin with the tokenizer's beginning-of-text token. Which test rows are asked depends on (seed, data set) alone.
    """

    datasets: tuple[str, ...] = tuple(SOURCES)
    data: str = ""
    shots: tuple[int, ...] = (16,)
    draws: tuple[int, ...] = DRAWS
    example_tokens: int = 256
    skip_broken: bool = False
    opening: bool = True

    name: ClassVar[str] = "metaicl"
    wording: ClassVar[Wording] = Wording(
        "published few-shot tasks",
        "The model sees a few solved examples of a data set and must choose the right answer for one more.",
    )
    version: ClassVar[int] = 1
    choices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the options; the data are read by `cells`."""
        if not self.datasets or not self.shots or not self.draws:
            raise UserError("metaicl: give at least one data set, one number of shots and one draw")
        for dataset in self.datasets:
            if dataset not in SOURCES and not self.data:
                raise UserError(
                    f'metaicl: unknown dataset "{dataset}"; known: {", ".join(SOURCES)}; others need data=FOLDER.'
                    + did_you_mean(dataset, SOURCES)
                )
        if min(self.shots) < 0:
            raise UserError(f"metaicl: shots must not be negative, got {min(self.shots)}")
        if not all(0 <= draw < 2**32 for draw in self.draws):
            raise UserError("metaicl: draws must be between 0 and 4294967295")
        if self.example_tokens < 0:
            raise UserError(f"metaicl: example_tokens must not be negative (0: no cut), got {self.example_tokens}")

    @cached_property
    def _splits(self) -> dict[str, _Split]:
        return {dataset: self._read(dataset) for dataset in self.datasets}

    def _read(self, dataset: str) -> _Split:
        if self.data:
            train, test = (local_file(self.data, f"{dataset}_{part}.jsonl") for part in ("train", "test"))
            return _Split(
                read_jsonl(train, parse_demonstration, self.skip_broken),
                read_jsonl(test, parse_question, self.skip_broken),
            )
        path, config, convert = SOURCES[dataset]
        return _Split(
            read_hub(path, config, "train", convert, parse_demonstration, self.skip_broken),
            read_hub(path, config, "validation", convert, parse_question, self.skip_broken),
        )

    def data_facts(self) -> dict[str, dict[str, Any]]:
        """Return per data set how many rows it has, how many were left out, and the sha256 of the rows used."""
        return {
            dataset: {
                f"{part}_{fact}": getattr(rows, fact) if fact != "rows" else len(rows.rows)
                for part, rows in split._asdict().items()
                for fact in ("rows", "skipped", "sha256")
            }
            for dataset, split in self._splits.items()
        }

    def cells(self, lengths: Sequence[int]) -> list[Cell]:
        """Return the cells to run; reads the data. Raises `UserError` when there are fewer training rows than shots."""
        for dataset, split in self._splits.items():
            if max(self.shots) > len(split.train.rows):
                raise UserError(
                    f"metaicl: {dataset} has {len(split.train.rows)} training rows, fewer than {max(self.shots)} shots"
                )
        return [
            {"dataset": dataset, "shots": shots, "draw": draw}
            for dataset in self.datasets
            for shots in self.shots
            for draw in self.draws
        ]

    def answers_per_sample(self, cell: Cell) -> int:
        """Return 1: one choice per sample."""
        return 1

    def available(self, cell: Cell) -> int:
        """Return how many samples the cell has."""
        return len(self._splits[str(cell["dataset"])].test.rows)

    def shown(self, cell: Cell) -> list[Example]:
        """Return the demonstrations of a cell."""
        train = self._splits[str(cell["dataset"])].train.rows
        # RandomState's stream is frozen by numpy's compatibility policy, unlike that of Generator's methods.
        order = np.random.RandomState(int(cell["draw"])).permutation(len(train))
        return [train[place] for place in order[: int(cell["shots"])]]

    def sample(self, encode: PieceEncoder, cell: Cell, index: int, seed: int) -> ChoiceSample:
        """Return sample `index` of `cell`, the same for the same arguments and data."""
        dataset = str(cell["dataset"])
        test = self._splits[dataset].test.rows
        order = encode.derived(
            ("metaicl order", dataset, len(test), seed), lambda: shuffled_rows(self.name, dataset, len(test), seed)
        )
        asked = test[order[index]]
        joined = Demonstrations(encode, self.example_tokens or None, self.opening)
        shots, draw = int(cell["shots"]), int(cell["draw"])
        digest = self._splits[dataset].train.sha256
        place = ("metaicl shown", digest, shots, draw, self.example_tokens, self.opening)
        prefix = encode.derived(place, lambda: joined.prefix(self.shown(cell)))
        return joined.sample(prefix, asked, first=shots == 0, shared=True)


def shuffled_rows(task: str, dataset: str, count: int, seed: int) -> list[int]:
    """Return the numbers 0 to `count` - 1 in the order in which a data set's rows are asked."""
    drawn = sample_generator(seed, task, {"dataset": dataset}, 0).random(count)
    order: list[int] = np.argsort(drawn, kind="stable").tolist()
    return order
