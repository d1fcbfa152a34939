"""The work of a diagnosis in groups, each of which leaves a record: timed, watched, kept and shared among processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from longrecall.diagnostics.divergence import Divergence, DivergenceWatch, first_of
from longrecall.diagnostics.plan import PARTS
from longrecall.diagnostics.streaming import Observer, Segment
from longrecall.evaluation.journal import Journal
from longrecall.evaluation.parallel import Ranks


class Clock:
    """Seconds and CPU seconds of each part."""

    def __init__(self) -> None:
        self.times = {part: [0.0, 0.0] for part in PARTS}

    @contextmanager
    def run(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part's."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.times[part][0] += time.perf_counter() - wall
            self.times[part][1] += time.process_time() - cpu

    def record(self) -> dict[str, list[float]]:
        """Return part -> [seconds, CPU seconds]."""
        return {part: [round(number, 6) for number in times] for part, times in self.times.items() if any(times)}

    def add(self, record: Mapping[str, Sequence[float]]) -> None:
        """Add what `record` returned of another clock."""
        for part, times in record.items():
            self.times[part] = [old + new for old, new in zip(self.times[part], times, strict=True)]

    def entries(self, parts: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the "timing" section of a result."""
        names = ("seconds", "cpu_seconds")
        return {part: dict(zip(names, (round(t, 3) for t in self.times[part]), strict=True)) for part in parts}


class Timed:
    """An observer whose time counts as another part's: what the statistics of the state cost beside the reading."""

    def __init__(self, observer: Observer, clock: Clock, part: str, paid_by: str) -> None:
        self._observer, self._clock, self._part, self._paid_by = observer, clock, part, paid_by

    def stops(self) -> Sequence[int]:
        """As the observer's."""
        return self._observer.stops()

    def see(self, segment: Segment) -> None:
        """Let the observer see the segment."""
        before = list(self._clock.times[self._part])
        with self._clock.run(self._part):
            self._observer.see(segment)
        if self._paid_by != self._part:
            paid = self._clock.times[self._paid_by]
            for index, (new, old) in enumerate(zip(self._clock.times[self._part], before, strict=True)):
                paid[index] -= new - old


Read = Callable[[int, DivergenceWatch | None, Clock], Any]
"""Does the work of one group, under a watch where one is wanted, and returns what it found as plain JSON."""


class Work:
    """The work of one diagnosis: what of it is done, who does what, how far it is.

    A group is what is read together. Which groups there are must depend on the model and the settings alone, not on
    what is done already nor on the number of processes: then every run makes the same batches and ends with the same
    numbers.
    """

    def __init__(self, model: Any, journal: Journal, ranks: Ranks, bar: tqdm[Any]) -> None:
        self._model, self._journal, self._ranks, self._bar = model, journal, ranks, bar
        self.clock = Clock()
        self.divergence: list[dict[str, Any]] = []
        """The first divergence of each part that has one."""

    def expect(self, key: str, tokens: Mapping[int, int]) -> None:
        """Lengthen the progress bar by the groups (index -> tokens) of `key` that this process will read."""
        self._bar.total = (self._bar.total or 0) + sum(tokens[index] for index in self._mine(key, tokens))
        self._bar.refresh()

    def advance(self, tokens: int) -> None:
        """Move the progress bar."""
        self._bar.update(tokens)

    def describe(self, words: str) -> None:
        """Say beside the bar what is being done."""
        self._bar.set_description(words)

    def records(self, part: str, key: str, indexes: Sequence[int], read: Read) -> list[Any]:
        """Return what `read` finds for each group of `key`: kept by an earlier run, read now, or by another process."""
        watched = all(entry["part"] != part for entry in self.divergence)

        def record(index: int) -> dict[str, Any]:
            watch, clock = DivergenceWatch(self._model) if watched else None, Clock()
            with clock.run(part):
                found = read(index, watch, clock)
            bad = asdict(watch.found) if watch is not None and watch.found is not None else None
            return {"found": found, "divergence": bad, "times": clock.record()}

        done = self._journal.keep(key, ({index: record(index)} for index in self._mine(key, indexes)))
        done[key] |= {index: old for index, old in self._journal.done.get(key, {}).items() if index in indexes}
        gathered = self._journal.gather(done)[key]
        records = [gathered[index][0] for index in indexes]
        for entry in records:
            self.clock.add(entry["times"])
        first = first_of([Divergence(**entry["divergence"]) for entry in records if entry["divergence"] is not None])
        if first is not None:
            self.divergence.append({"part": part, **asdict(first)})
        return [entry["found"] for entry in records]

    def _mine(self, key: str, indexes: Iterable[int]) -> list[int]:
        done = self._journal.done.get(key, {})
        return self._ranks.share([index for index in indexes if index not in done], 1)
