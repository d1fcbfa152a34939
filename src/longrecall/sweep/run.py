"""`longrecall sweep`, from the recipe to the result file."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from longrecall.errors import UserError
from longrecall.evaluation.results import environment, now
from longrecall.outputs import claim_file
from longrecall.sweep.grid import RunSpec, runs_of, shard
from longrecall.sweep.journal import ADVICE, KIND, SCHEMA, Journal, shard_path
from longrecall.sweep.recipe import SweepRecipe
from longrecall.sweep.scheduler import choose_device, train_all
from longrecall.sweep.slots import checkpoint_of
from longrecall.sweep.summary import best_rows, progress_line, summary_lines
from longrecall.version import __version__

Row = dict[str, Any]


@dataclass(frozen=True)
class SweepSummary:
    """What a call of `sweep` leaves: where, how much of it, and the rows."""

    output: Path
    runs: int
    """Runs that the recipe (or the shard) has."""
    rows: list[Row]
    metric: str

    @property
    def complete(self) -> bool:
        """Whether every run has its row."""
        return len(self.rows) == self.runs

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        counts = {
            status: sum(row["status"] == status for row in self.rows) for status in ("done", "diverged", "failed")
        }
        return {
            "output": str(self.output),
            "complete": self.complete,
            "runs": self.runs,
            **counts,
            "best": best_rows(self.rows, self.metric),
        }

    def lines(self) -> list[str]:
        """Return the tables, what went wrong, and where everything is."""
        lines = summary_lines(self.rows, self.metric)
        for status in ("diverged", "failed"):
            count = sum(row["status"] == status for row in self.rows)
            reasons = dict.fromkeys(str(row["reason"]) for row in self.rows if row["status"] == status == "failed")
            lines += [f"{count} of {self.runs} runs {status}", *(f"  {reason}" for reason in reasons)] if count else []
        rest = self.runs - len(self.rows)
        open_runs = f"; {rest} of {self.runs} runs are left: --resume goes on" if rest else ""
        return [*lines, "", f"wrote {self.output}{open_runs}"]


def run_sweep(
    recipe: SweepRecipe,
    *,
    resume: bool = False,
    retry: bool = False,
    force: bool = False,
    shard_of: tuple[int, int] | None = None,
    show_progress: bool = True,
) -> SweepSummary:
    """Train every run of a recipe that has no row yet and write the result file.

    Args:
        recipe: the sweep.
        resume: keep the rows that earlier calls wrote.
        retry: when resuming, train again what failed.
        force: start over and replace what is there.
        shard_of: (i, n): only every n-th run, beginning with the i-th, into a file of its own.
        show_progress: a bar on stderr where that is a terminal, else a line there for each run that ends.

    Raises:
        UserError: a recipe that cannot be, a file in the way, another process that writes it, a device that is not
            there.
    """
    # At once: what is wrong with the recipe or the machine shows before anything runs.
    runs = runs_of(recipe)
    wanted = runs if shard_of is None else shard(runs, *shard_of)
    if not wanted:
        raise UserError(f"the recipe has {len(runs)} runs: shard {shard_of} of them is empty; use fewer shards")
    device = choose_device(recipe.run.device)
    path = shard_path(recipe.run.output, shard_of)
    with claim_file(path, force=force, resume=resume, advice=ADVICE):
        journal = Journal(recipe.run.output, shard_of, resume)
        rows = _earlier(journal, wanted, retry)
        left = [spec for spec in wanted if spec.key not in rows]
        checkpoints = _checkpoint_folder(recipe, [] if resume else wanted)
        _train(recipe, left, rows, device, journal, wanted, show_progress, checkpoints)
    ordered = [rows[spec.key] for spec in wanted if spec.key in rows]
    return SweepSummary(journal.path, len(wanted), ordered, recipe.training.metric)


def _earlier(journal: Journal, wanted: list[RunSpec], retry: bool) -> dict[str, Row]:
    """Return key -> row of what need not be trained; refuse a journal with rows of another recipe."""
    keys = {spec.key for spec in wanted}
    if strange := journal.own.keys() - keys:
        raise UserError(
            f"cannot resume {journal.path}: it holds {len(strange)} rows of runs that are not in this recipe; "
            "choose another run.output, or start over with --force"
        )
    return {key: row for key, row in journal.done.items() if key in keys and not (retry and row["status"] == "failed")}


def _checkpoint_folder(recipe: SweepRecipe, anew: list[RunSpec]) -> Path | None:
    """Return the folder of stopped runs, made if need be; those that are to begin anew are deleted."""
    if recipe.run.checkpoints is None:
        return None
    folder = Path(recipe.run.checkpoints)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for spec in anew:
            checkpoint_of(spec, folder).unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"run.checkpoints {folder} cannot be used: {reason}; name a folder") from None
    return folder


def _train(
    recipe: SweepRecipe,
    left: list[RunSpec],
    rows: dict[str, Row],
    device: torch.device,
    journal: Journal,
    wanted: list[RunSpec],
    show_progress: bool,
    checkpoints: Path | None,
) -> None:
    """Add the rows of the runs that are `left` to `rows` and write the result file; interrupted, the journal stays."""
    journal.start()
    deadline = None if recipe.run.budget is None else time.time() + recipe.run.budget
    running: list[Row] = []
    bar = tqdm(total=len(wanted), initial=len(rows), desc="sweep", unit="run", disable=None if show_progress else True)

    def keep(row: Row) -> None:
        journal.add(row)
        rows[row["key"]] = row
        bar.update()
        if show_progress and bar.disable:
            print(progress_line(row, len(rows), len(wanted), recipe.training.metric), file=sys.stderr, flush=True)

    run = recipe.run
    how = (run.processes, running.append, run.matmul_precision, checkpoints)
    try:
        train_all(left, device, run.parallel, deadline, keep, *how)
    finally:
        bar.close()
        journal.close()
    ordered = [rows[spec.key] for spec in wanted if spec.key in rows]
    journal.finish(_result(recipe, ordered, len(wanted), str(device), running))


def _result(recipe: SweepRecipe, rows: list[Row], runs: int, device: str, running: list[Row]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": now(),
        "longrecall": __version__,
        "environment": environment(device),
        "recipe": asdict(recipe),
        "complete": len(rows) == runs,
        "runs": runs,
        "rows": rows,
        "running": running,
    }
