"""All parts of a diagnosis on one model, in as few readings as possible, into one result with a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from longrecall.diagnostics.divergence import DivergenceWatch
from longrecall.diagnostics.effective_remembrance import (
    check_starts,
    default_starts,
    prediction_changes,
    remembrance_entries,
    tokens_to_read,
)
from longrecall.diagnostics.plan import Plan, check_parts, make_plan
from longrecall.diagnostics.position_perplexity import PositionLosses, position_edges
from longrecall.diagnostics.recall_length import (
    DOUBLINGS,
    key_groups,
    recall_lengths,
    recalled_keys,
    samples_at,
    search_lengths,
    tokens_of,
)
from longrecall.diagnostics.records import joined, to_plain
from longrecall.diagnostics.results import DIAGNOSIS
from longrecall.diagnostics.state_statistics import StateStatistics, has_recurrent_state, log_positions
from longrecall.diagnostics.streaming import Observer, read, segment_size, text_windows, windows_at_once
from longrecall.diagnostics.verdict import verdict
from longrecall.diagnostics.work import Clock, Timed, Work
from longrecall.evaluation.engine import describe_model
from longrecall.evaluation.journal import Journal
from longrecall.evaluation.parallel import Ranks
from longrecall.evaluation.results import SCHEMA, environment, now
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.loading import load, preferred_device
from longrecall.tasks.encoding import Cell, PieceEncoder
from longrecall.tasks.passkey import Passkey
from longrecall.tasks.text import read_text
from longrecall.version import __version__


def diagnose(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    training_length: int | None = None,
    multiple: int = 16,
    sequences: int = 8,
    parts: Sequence[str] | None = None,
    seed: int = 0,
    starts: Sequence[int] | None = None,
    recall_samples: int = 40,
    recall_doublings: int = DOUBLINGS,
    batch_tokens: int = 2048,
    segment_tokens: int = 256,
    text_name: str = "",
    checkpoint: dict[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Look at what `model` does past its training length and return a result as docs/diagnostics.md describes it.

    Args:
        model: a `RecurrentLM`.
        tokenizer: of transformers, or anything with the parts that the tasks use.
        text: running text of at least `multiple` times the training length in tokens.
        training_length: tokens; None = the config's `context_length`.
        multiple: how far to look, in training lengths, at least 2.
        sequences: windows of the text at most; intervals are over these.
        parts: of `PARTS`; None = all that the model has something for.
        seed: of pass keys and bootstraps.
        starts: the grid of t of effective remembrance; None = `default_starts`.
        recall_samples: pass keys per length at first, at most.
        recall_doublings: how often as many pass keys again are asked, at most, where it is not sure that half are
            recalled, or that they are not.
        batch_tokens: tokens that one forward pass reads at most (never less than one column of all rows).
        segment_tokens: columns read at once at most; memory does not grow with the length.
        text_name: recorded in the settings.
        checkpoint: recorded as "checkpoint"; made from the model when None.
        out: result file. While it is not complete, what is finished is kept in ``<out>.partial``. One run at a time
            writes it; what is there already, finished or not, is refused without `resume` or `force`.
        resume: skip what an earlier run with the same model, text and settings finished.
        force: start over and replace what is there.
        progress: show a bar with the time left on stderr, where that is a terminal.
        ranks: this process among several that call this with the same arguments (`torchrun_ranks`); each reads its
            share, all return the whole result, the first one writes it.

    Raises:
        UserError: bad settings, a text that is too short, no training length, an `out` that cannot be written, that is
            there already or that another process is writing, a journal of another model, text or settings, or the part
            "state" for a model without recurrent layers. NaN and infinity are findings, not errors.
    """
    plan = make_plan(
        model.config.context_length if training_length is None else training_length,
        multiple=multiple,
        sequences=sequences,
        seed=seed,
        parts=None if parts is None else tuple(parts),
        starts=None if starts is None else tuple(starts),
        recall_samples=recall_samples,
        recall_doublings=recall_doublings,
        batch_tokens=batch_tokens,
        segment_tokens=segment_tokens,
        recurrent=has_recurrent_state(model),
    )
    about = checkpoint if checkpoint is not None else describe_model(model)
    settings = _settings(plan, model, text, text_name)
    ranks = ranks or Ranks()
    with ranks.claim(out, force=force, resume=resume):
        journal = Journal(out, settings, about.get("fingerprint"), resume, ranks, DIAGNOSIS)
        if journal.complete is not None:
            return journal.complete
        run = _Run(model, tokenizer, text, plan)
        training = bool(model.training)
        model.eval()
        journal.start()
        try:
            sections = run.all(journal, ranks, progress)
        finally:
            journal.close()
            model.train(training)
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "diagnosis",
            "created": now(),
            "longrecall": __version__,
            "environment": environment(str(model.device)),
            "checkpoint": about | {"layers": len(model.config.layers)},
            "settings": settings,
            **sections,
        }
        result["verdict"] = verdict(result)
        journal.finish(result)
        return result


def diagnose_checkpoint(
    path: str | Path,
    text: str | Path,
    *,
    training_length: int | None = None,
    parts: Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    ranks: Ranks | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Load the checkpoint at `path` (a folder or a hub id) and `diagnose` it on the UTF-8 file `text`.

    `device` None means CUDA where there is one (with several processes on a machine, one GPU each), else the CPU;
    `dtype` None means as stored. What can be checked without the model is checked before it is loaded: `out`, parts,
    text, checkpoint, settings and tokenizer, in this order.
    """
    ranks = ranks or Ranks()
    with ranks.claim(out, force=force, resume=resume):
        if parts is not None:
            check_parts(parts)
        words = read_text(text)
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        length = config.context_length if training_length is None else training_length
        asked = {name: value for name, value in settings.items() if name != "progress"}
        make_plan(length, parts=None if parts is None else tuple(parts), recurrent=config.state_size() > 0, **asked)
        tokenizer = load_tokenizer(checkpoint.path, config.vocab_size)
        model = load(path, dtype=dtype, device=preferred_device(ranks.device(device)))
        return diagnose(
            model,
            tokenizer,
            words,
            training_length=length,
            parts=parts,
            text_name=Path(text).name,
            checkpoint=describe_model(model, str(path), checkpoint.surgery),
            out=out,
            resume=resume,
            force=force,
            ranks=ranks,
            **settings,
        )


def _settings(plan: Plan, model: Any, text: str, text_name: str) -> dict[str, Any]:
    """Return everything that decides the numbers, as plain JSON; the text as its name and hash."""
    fields = asdict(plan) | {"parts": list(plan.parts), "dtype": str(model.dtype).removeprefix("torch.")}
    fields["starts"] = None if plan.starts is None else list(plan.starts)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    # How the work is cut into pieces does not decide the numbers.
    kept = {key: value for key, value in fields.items() if key not in ("batch_tokens", "segment_tokens")}
    return {"text": text_name, "text_sha256": digest, **kept}


Step = Callable[[], dict[str, Any]]
"""Does the work of some parts and returns their sections of the result."""


class _Run:
    """One diagnosis under way. A text that is too short, and impossible lengths, fail here, before anything runs."""

    def __init__(self, model: Any, tokenizer: Any, text: str, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.task, self.encode = Passkey(), PieceEncoder(tokenizer)
        self.ids, self.sizes = np.empty((0, 0), dtype=np.int64), None
        if plan.text_length:
            self.ids, self.sizes = text_windows(tokenizer, text, plan.text_length, plan.sequences)
        if "recall" in plan.parts:
            self.task.sample(self.encode, {"length": plan.length, "depth": 0.0}, 0, plan.seed)

    def all(self, journal: Journal, ranks: Ranks, progress: bool) -> dict[str, Any]:
        """Run every part and return the sections of the result."""
        plan = self.plan
        sections: dict[str, Any] = {
            "perplexity": [],
            "state": {"positions": [], "fill": [], "layers": []},
            "remembrance": {"length": plan.remembrance_length, "points": []},
            "recall": {"points": [], "maximum": {}, "maximum_intervals": {}},
        }
        silent = None if progress and ranks.first else True
        with tqdm(total=0, unit="tok", unit_scale=True, desc="diagnose", disable=silent, leave=False) as bar:
            work = Work(self.model, journal, ranks, bar)
            # All say what they expect before the first one runs.
            steps: dict[str, Step] = {}
            if {"perplexity", "state"} & set(plan.parts):
                steps["perplexity and state"] = self._text(work)
            if "remembrance" in plan.parts:
                steps["remembrance"] = self._remembrance(work)
            if "recall" in plan.parts:
                steps["recall"] = self._recall(work)
            for name, step in steps.items():
                work.describe(name)
                sections |= step()
        return sections | {"divergence": work.divergence, "timing": work.clock.entries(plan.parts)}

    def _windows(self, work: Work, key: str, tokens: int, copies: int) -> list[slice]:
        """Return the groups of windows that are read together; `tokens` are read for each, into `copies` states."""
        size = windows_at_once(self.model, tokens, copies)
        groups = [slice(first, min(first + size, len(self.ids))) for first in range(0, len(self.ids), size)]
        work.expect(key, {index: tokens * (group.stop - group.start) for index, group in enumerate(groups)})
        return groups

    def _text(self, work: Work) -> Step:
        """Read the windows once for the loss and the state."""
        plan = self.plan
        reader = "perplexity" if "perplexity" in plan.parts else "state"
        edges = position_edges(plan.training_length, plan.length)
        positions = log_positions(plan.length, plan.training_length)
        groups = self._windows(work, "text", plan.length, 1)

        def one(index: int, watch: DivergenceWatch | None, clock: Clock) -> dict[str, Any]:
            ids = self.ids[groups[index]]
            sizes = None if self.sizes is None else self.sizes[groups[index]]
            losses = PositionLosses(edges, len(ids), sizes, plan.training_length)
            statistics = StateStatistics(positions)
            observers: list[Observer] = [] if watch is None else [watch]
            if "perplexity" in plan.parts:
                observers.append(losses)
            if "state" in plan.parts:
                observers.append(Timed(statistics, clock, "state", paid_by=reader))
            last_only = "perplexity" not in plan.parts
            columns = segment_size(len(ids), int(self.model.config.vocab_size), plan.batch_tokens, plan.segment_tokens)
            read(self.model, ids, observers, columns, work.advance, last_only)
            return {"perplexity": losses.record(), "state": statistics.record()}

        def step() -> dict[str, Any]:
            found = work.records(reader, "text", range(len(groups)), one)
            sections: dict[str, Any] = {}
            if "perplexity" in plan.parts:
                losses = PositionLosses.joined(edges, [part["perplexity"] for part in found], plan.training_length)
                sections["perplexity"] = losses.entries(plan.seed)
            if "state" in plan.parts:
                statistics = StateStatistics.joined(positions, [part["state"] for part in found])
                sections["state"] = statistics.entries(self.model.config.layers, plan.seed)
            return sections

        return step

    def _remembrance(self, work: Work) -> Step:
        plan, length = self.plan, self.plan.remembrance_length
        grid = check_starts(default_starts(length) if plan.starts is None else plan.starts, length)
        groups = self._windows(work, "remembrance", tokens_to_read(1, length, grid), len(grid) + 1)

        def one(index: int, watch: DivergenceWatch | None, clock: Clock) -> Any:
            ids = self.ids[groups[index], :length]
            return to_plain(
                prediction_changes(self.model, ids, grid, plan.batch_tokens, plan.segment_tokens, work.advance, watch)
            )

        def step() -> dict[str, Any]:
            changes = joined(work.records("remembrance", "remembrance", range(len(groups)), one), axis=1)
            return {"remembrance": remembrance_entries(length, grid, changes, plan.seed)}

        return step

    def _recall(self, work: Work) -> Step:
        plan, task = self.plan, self.task
        lengths = recall_lengths(task, self.encode, plan.length, plan.training_length)

        def groups_of(cell: Cell, indexes: range, expect: bool) -> dict[int, range]:
            """Return the groups by their first key."""
            groups = {group[0]: group for group in key_groups(self.model, indexes)}
            if expect:
                tokens = {first: tokens_of(cell, len(group)) for first, group in groups.items()}
                work.expect(_key(cell), tokens)
            return groups

        for cell in task.cells(lengths):
            groups_of(cell, range(samples_at(int(cell["length"]), plan.recall_samples, len(task.depths))), expect=True)

        def ask(cell: Cell, indexes: range) -> list[bool]:
            # The first keys of the lengths in the plan are on the bar already.
            more = indexes.start > 0 or cell["length"] not in lengths
            groups = groups_of(cell, indexes, expect=more)

            def one(index: int, watch: DivergenceWatch | None, clock: Clock) -> list[bool]:
                keys = [task.sample(self.encode, cell, key, plan.seed) for key in groups[index]]
                return recalled_keys(self.model, keys, plan.batch_tokens, plan.segment_tokens, work.advance, watch)

            return [key for group in work.records("recall", _key(cell), list(groups), one) for key in group]

        def step() -> dict[str, Any]:
            return {"recall": search_lengths(task, lengths, plan.recall_samples, plan.recall_doublings, ask)}

        return step


def _key(cell: Cell) -> str:
    """Return the name of a cell in the journal."""
    return f"recall {json.dumps(cell, sort_keys=True, separators=(',', ':'))}"
