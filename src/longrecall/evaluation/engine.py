"""Running tasks on a model: every example once, resumable, alone or among several processes, into one result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from longrecall.errors import UserError
from longrecall.evaluation.harness import HarnessTask
from longrecall.evaluation.journal import Done, Journal
from longrecall.evaluation.memory import Room, check_fits
from longrecall.evaluation.parallel import Ranks
from longrecall.evaluation.passage_similarity import PassageSimilarity
from longrecall.evaluation.position_loss import PositionLoss
from longrecall.evaluation.preparing import check_numbers, create_tasks, describe_model, result_settings
from longrecall.evaluation.recall import CellJob
from longrecall.evaluation.results import (
    SCHEMA,
    definitions,
    environment,
    now,
    summarise,
    summary_intervals,
)
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.registry import PositionTask, Task
from longrecall.version import __version__

__all__ = ["create_tasks", "describe_model", "evaluate"]


class _Job(Protocol):
    """Examples that make some result entries together: those of one cell, or the windows of a text."""

    @property
    def key(self) -> str:
        """Names the job, the same in every run."""
        ...

    @property
    def count(self) -> int:
        """How many examples."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of one of them, about."""
        ...

    @property
    def align(self) -> int:
        """Examples that must not be parted: those from one multiple of this to the next."""
        ...

    def run(self, indexes: Sequence[int], advance: Callable[[int], object]) -> Iterator[dict[int, dict[str, Any]]]:
        """Read examples; yield their records batch by batch."""
        ...

    def entries(self, records: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the result entries from the records of all examples."""
        ...


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str | Task],
    lengths: Sequence[int | str],
    samples: int,
    seed: int = 0,
    *,
    text: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    batch_tokens: int = 16384,
    segment_tokens: int = 2048,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    checkpoint: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Measure `model` on `tasks` and return a result as docs/reference/files.md describes it.

    Args:
        model: a `RecurrentLM` (or any causal model of transformers that takes and returns `past_key_values`).
        tokenizer: of transformers, or anything with the parts that the tasks use.
        tasks: names (`longrecall.tasks.task_names`) or task objects.
        lengths: tokens (512, "4k"): the prompt lengths of passkey, babilong and the needles; the longest is the window
            of bits_per_byte. Some tasks count another unit, which they declare (copying: letters of the string).
        samples: answers per cell of a recall task (rounded up to whole sequences), windows of text at most.
        seed: of samples and bootstraps; a sample depends on (seed, task, cell, index) only.
        text: for bits_per_byte, as the distractor of phonebook and the haystack of babilong and the needles.
        options: per task name the fields of its class, e.g. ``{"phonebook": {"pairs": (2, 4)}}``.
        batch_tokens: tokens that one forward pass reads at most; less when memory runs out. It changes no answer.
        segment_tokens: columns read at once; longer sequences carry their state, so memory stays flat.
        out: result file. While it is not complete, finished examples are kept in ``<out>.partial``. One run at a time
            writes it; what is there already, finished or not, is refused without `resume` or `force`.
        resume: skip what an earlier run with the same settings finished; a finished result is returned as it is.
        force: start over and replace what is there.
        progress: show a bar with the time left on stderr, where that is a terminal.
        checkpoint: recorded as "checkpoint"; made from the model when None.
        ranks: this process among several that call this with the same arguments (`torchrun_ranks`); each reads its
            share, all return the whole result, the first one writes it.

    Raises:
        UserError: bad settings, text too short, a journal of other settings, an `out` that cannot be written, that is
            there already or that another process is writing, a length that this machine cannot hold, memory that does
            not suffice for one sequence.
    """
    sizes = check_numbers(lengths, samples, batch_tokens, segment_tokens)
    chosen = create_tasks(tasks, text, options)
    about = dict(checkpoint) if checkpoint is not None else describe_model(model)
    settings = result_settings(chosen, sizes, samples, seed, model)
    ranks = ranks or Ranks()
    with ranks.claim(out, force=force, resume=resume):
        journal = Journal(out, settings, about.get("fingerprint"), resume, ranks)
        if journal.complete is not None:
            return journal.complete
        jobs = _jobs(model, tokenizer, chosen, sizes, samples, seed, Room(model, batch_tokens, segment_tokens))
        training = bool(getattr(model, "training", False))
        model.eval()
        journal.start()
        try:
            done = _run(jobs, journal, ranks, progress)
        finally:
            journal.close()
            model.train(training)
        entries = [entry for job in jobs for entry in _entries(job, done[job.key])]
        result = _result(entries, about, settings, str(model.device)) | definitions(chosen, settings["options"])
        journal.finish(result)
        return result


def _run(jobs: Sequence[_Job], journal: Journal, ranks: Ranks, progress: bool) -> Done:
    """Read what is missing; return all that is done, by all processes and earlier runs."""
    done: Done = {job.key: dict(journal.done.get(job.key, {})) for job in jobs}
    shares = {
        job.key: ranks.share([index for index in range(job.count) if index not in done[job.key]], job.align)
        for job in jobs
    }
    total = sum(job.tokens * len(shares[job.key]) for job in jobs)
    silent = None if progress and ranks.first else True
    with tqdm(total=total, unit="tok", unit_scale=True, desc="eval", disable=silent, leave=False) as bar:
        for job in jobs:
            bar.set_description(job.key)
            done[job.key] |= journal.keep(job.key, job.run(shares[job.key], bar.update))[job.key]
    return journal.gather(done)


def _entries(job: _Job, done: Mapping[int, tuple[dict[str, Any], float]]) -> list[dict[str, Any]]:
    seconds = round(sum(done[index][1] for index in range(job.count)), 3)
    entries = job.entries({index: record for index, (record, _) in done.items()})
    return [entry | {"seconds": seconds} for entry in entries]


def _jobs(
    model: Any, tokenizer: Any, tasks: Sequence[Task], lengths: list[int], samples: int, seed: int, room: Room
) -> list[_Job]:
    """Return what is to do. Draws the first sample of each cell, so impossible cells fail before anything runs."""
    encode = PieceEncoder(tokenizer, similarity=PassageSimilarity(model))
    jobs: list[_Job] = []
    for task in tasks:
        if isinstance(task, HarnessTask):
            from longrecall.evaluation.harness.job import HarnessJob

            jobs.append(HarnessJob(task, model, tokenizer, lengths, samples, seed, room))
            continue
        cells = task.cells(lengths)
        for index, cell in enumerate(cells):
            if cell in cells[:index]:
                named = ", ".join(f"{key} {value}" for key, value in cell.items())
                raise UserError(f"{task.name}: {named} is asked for twice; name each value once")
            check_fits(model, task.name, cell)
        if isinstance(task, PositionTask):
            jobs.append(PositionLoss(model, task, tokenizer, lengths, samples, seed, room))
        else:
            jobs += [CellJob(model, tokenizer, encode, task, cell, samples, seed, room) for cell in cells]
    return jobs


def _result(
    entries: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any], device: str
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "evaluation",
        "created": now(),
        "longrecall": __version__,
        "environment": environment(device),
        "checkpoint": about,
        "settings": settings,
        "results": entries,
        "summary": summarise(entries),
        "summary_intervals": summary_intervals(entries),
    }
