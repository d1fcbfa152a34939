"""Running a harness task in our engine: our batches, journal and processes; the harness's own questions and scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from longrecall.errors import UserError
from longrecall.evaluation.harness.entries import result_entries, single_process
from longrecall.evaluation.harness.language_model import NO_ANSWER, LongrecallLM, units_of
from longrecall.evaluation.harness.loading import load_tasks, quiet_and_seeded
from longrecall.evaluation.harness.task import HarnessTask
from longrecall.evaluation.memory import Room
from longrecall.tasks.encoding import cell_key

Records = dict[int, dict[str, Any]]


class HarnessJob:
    """All documents of one harness task, or of all tasks of a group; an example is what is asked about a document.

    The answers come first and are kept; then the harness scores them as it would have scored its own model's.
    """

    align = 1

    def __init__(
        self,
        task: HarnessTask,
        model: Any,
        tokenizer: Any,
        lengths: Sequence[int],
        documents: int,
        seed: int,
        room: Room,
    ) -> None:
        self.key = cell_key(task.name, {})
        self._task, self._documents, self._seed = task, documents, seed
        self._model = LongrecallLM(model, tokenizer=tokenizer, room=room, max_length=task.max_length)
        with quiet_and_seeded(seed):
            self._loaded = load_tasks(task, lengths, documents, seed, tokenizer)
        self._units = [unit for leaf in self._loaded["tasks"].values() for unit in units_of(leaf.instances)]
        self.count = len(self._units)
        # What cannot be answered (sampled text, say) fails here, before anything runs.
        self.tokens = max(
            self._model.tokens(unit) for unit in {unit[0].request_type: unit for unit in self._units}.values()
        )

    def run(self, indexes: Sequence[int], advance: Callable[[int], object]) -> Iterator[Records]:
        """Answer these examples; yield their records batch by batch."""
        for part in self._model.answers([self._units[index] for index in indexes]):
            yield {
                indexes[place]: {
                    "request": _digest(self._units[indexes[place]]),
                    "answers": answers,
                }
                for place, answers in part.items()
            }
            advance(self.tokens * len(part))

    def entries(self, records: Records) -> list[dict[str, Any]]:
        """Return the result entries: of each task under its own name with ``part_of`` a group, and of the group."""
        from lm_eval import evaluator

        answers: dict[int, Any] = {}
        diverged: dict[str, set[int]] = {}
        for index, unit in enumerate(self._units):
            if records[index]["request"] != _digest(unit):
                raise UserError(
                    f"{self._task.name}: its questions have changed since the answers in the journal were made; "
                    "start over with --force"
                )
            for request, kept in zip(unit, records[index]["answers"], strict=True):
                # JSON has no tuples.
                answers[id(request)] = tuple(kept) if isinstance(kept, list) else kept
                if kept is None:
                    answers[id(request)] = NO_ANSWER[request.request_type]
                    diverged.setdefault(request.task_name, set()).add(request.doc_id)
        for leaf in self._loaded["tasks"].values():
            # The requests are made already; made again, their demonstrations would be drawn anew.
            leaf.build_all_requests = _nothing
            for request in leaf.instances:
                request.resps.clear()
        # Of impossible texts the harness computes what is no number; the entries then say null.
        with quiet_and_seeded(self._seed), single_process(), np.errstate(invalid="ignore", over="ignore"):
            found = evaluator.evaluate(
                lm=_recorded(answers),
                task_dict=dict(self._loaded),
                limit=self._documents,
                bootstrap_iters=1000,
                log_samples=True,
            )
        entries = result_entries(found, {name: len(documents) for name, documents in diverged.items()})
        asked = self._task.name
        return [entry if entry["task"] == asked else entry | {"part_of": asked} for entry in entries]


def _recorded(answers: dict[int, Any]) -> Any:
    """Return a model of the harness that says again what was answered: one answer per request object."""
    from lm_eval.api.model import LM

    class Recorded(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            return [answers[id(request)] for request in requests]

        loglikelihood_rolling = loglikelihood
        generate_until = loglikelihood

    return Recorded()


def _nothing(**settings: Any) -> None:
    """Stand for making requests."""


def _digest(unit: Sequence[Any]) -> str:
    text = json.dumps([request.args for request in unit], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
