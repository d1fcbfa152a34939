"""All parts of a diagnosis on one model, in as few readings as possible, into one result with a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from longrecall.diagnostics import effective_remembrance as remembrance_part
from longrecall.diagnostics import recall_length as recall_part
from longrecall.diagnostics.divergence import DivergenceWatch
from longrecall.diagnostics.plan import PARTS, Plan, check_parts, make_plan
from longrecall.diagnostics.position_perplexity import PositionLosses, position_edges
from longrecall.diagnostics.state_statistics import StateStatistics, has_recurrent_state, log_positions
from longrecall.diagnostics.streaming import Observer, Segment, read, segment_size, text_windows
from longrecall.diagnostics.verdict import verdict
from longrecall.evaluation.engine import describe_model
from longrecall.evaluation.results import SCHEMA, environment, now
from longrecall.files import check_writable, write_json
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.loading import load, preferred_device
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.passkey import Passkey
from longrecall.tasks.text import read_text
from longrecall.version import __version__


class _Clock:
    """Seconds and CPU seconds of each part."""

    def __init__(self) -> None:
        self.times = {part: [0.0, 0.0] for part in PARTS}

    @contextmanager
    def run(self, part: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.times[part][0] += time.perf_counter() - wall
            self.times[part][1] += time.process_time() - cpu

    def entries(self, parts: Sequence[str]) -> dict[str, dict[str, float]]:
        names = ("seconds", "cpu_seconds")
        return {part: dict(zip(names, (round(t, 3) for t in self.times[part]), strict=True)) for part in parts}


class _Timed:
    """An observer whose time counts as another part's: what the statistics of the state cost beside the reading."""

    def __init__(self, observer: Observer, clock: _Clock, part: str, paid_by: str) -> None:
        self._observer, self._clock, self._part, self._paid_by = observer, clock, part, paid_by

    def stops(self) -> Sequence[int]:
        return self._observer.stops()

    def see(self, segment: Segment) -> None:
        before = list(self._clock.times[self._part])
        with self._clock.run(self._part):
            self._observer.see(segment)
        if self._paid_by != self._part:
            paid = self._clock.times[self._paid_by]
            for index, (new, old) in enumerate(zip(self._clock.times[self._part], before, strict=True)):
                paid[index] -= new - old


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
    batch_tokens: int = 2048,
    segment_tokens: int = 256,
    text_name: str = "",
    checkpoint: dict[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool = True,
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
        recall_samples: pass keys per length at most.
        batch_tokens: tokens that one forward pass reads at most (never less than one column of all rows).
        segment_tokens: columns read at once at most; memory does not grow with the length.
        text_name: recorded in the settings.
        checkpoint: recorded as "checkpoint"; made from the model when None.
        out: result file.
        progress: show a bar with the time left on stderr, where that is a terminal.

    Raises:
        UserError: bad settings, a text that is too short, no training length, an unwritable `out`, or the part "state"
            for a model without recurrent layers. NaN and infinity are findings, not errors.
    """
    if out is not None:
        check_writable(out)
    plan = make_plan(
        model.config.context_length if training_length is None else training_length,
        multiple=multiple,
        sequences=sequences,
        seed=seed,
        parts=None if parts is None else tuple(parts),
        starts=None if starts is None else tuple(starts),
        recall_samples=recall_samples,
        batch_tokens=batch_tokens,
        segment_tokens=segment_tokens,
        recurrent=has_recurrent_state(model),
    )
    run = _Run(model, tokenizer, plan)
    training = bool(model.training)
    model.eval()
    try:
        sections = run.all(text, progress)
    finally:
        model.train(training)
    about = checkpoint if checkpoint is not None else describe_model(model)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "diagnosis",
        "created": now(),
        "longrecall": __version__,
        "environment": environment(str(model.device)),
        "checkpoint": about | {"layers": len(model.config.layers)},
        "settings": {"text": text_name, **_settings(plan, model)},
        **sections,
    }
    result["verdict"] = verdict(result)
    if out is not None:
        write_json(out, result)
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
    **settings: Any,
) -> dict[str, Any]:
    """Load the checkpoint at `path` (a folder or a hub id) and `diagnose` it on the UTF-8 file `text`.

    `device` None means CUDA where there is one, else the CPU; `dtype` None means as stored. What can be checked without
    the model is checked before it is loaded: `out`, parts, text, checkpoint, settings and tokenizer, in this order.
    """
    if out is not None:
        check_writable(out)
    if parts is not None:
        check_parts(parts)
    words = read_text(text)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    length = config.context_length if training_length is None else training_length
    asked = {name: value for name, value in settings.items() if name != "progress"}
    make_plan(length, parts=None if parts is None else tuple(parts), recurrent=config.state_size() > 0, **asked)
    tokenizer = load_tokenizer(checkpoint.path, config.vocab_size)
    model = load(path, dtype=dtype, device=preferred_device(device))
    return diagnose(
        model,
        tokenizer,
        words,
        training_length=length,
        parts=parts,
        text_name=Path(text).name,
        checkpoint=describe_model(model, str(path), checkpoint.surgery),
        out=out,
        **settings,
    )


def _settings(plan: Plan, model: Any) -> dict[str, Any]:
    fields = asdict(plan) | {"parts": list(plan.parts), "dtype": str(model.dtype).removeprefix("torch.")}
    # How the work is cut into pieces does not decide the numbers.
    return {key: value for key, value in fields.items() if key not in ("starts", "batch_tokens", "segment_tokens")}


class _Run:
    """One diagnosis under way."""

    def __init__(self, model: Any, tokenizer: Any, plan: Plan) -> None:
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        self.clock = _Clock()
        self.divergence: list[dict[str, Any]] = []

    def all(self, text: str, progress: bool) -> dict[str, Any]:
        """Run every part and return the sections of the result."""
        plan = self.plan
        sections: dict[str, Any] = {
            "perplexity": [],
            "state": {"positions": [], "layers": []},
            "remembrance": {"length": plan.remembrance_length, "points": []},
            "recall": {"points": [], "maximum": {}},
        }
        ids, sizes = np.empty((0, 0), dtype=np.int64), None
        if plan.text_length:
            ids, sizes = text_windows(self.tokenizer, text, plan.text_length, plan.sequences)
        # Impossible lengths fail before anything runs.
        total = self._tokens(len(ids))
        shown = None if progress else True
        with tqdm(total=total, unit="tok", unit_scale=True, desc="diagnose", disable=shown, leave=False) as bar:
            if {"perplexity", "state"} & set(plan.parts):
                bar.set_description("perplexity and state")
                sections |= self._read_text(ids, sizes, bar.update)
            if "remembrance" in plan.parts:
                bar.set_description("remembrance")
                sections["remembrance"] = self._remembrance(ids[:, : plan.remembrance_length], bar.update)
            if "recall" in plan.parts:
                bar.set_description("recall")
                sections["recall"] = self._recall(bar.update)
        return sections | {"divergence": self.divergence, "timing": self.clock.entries(plan.parts)}

    def _tokens(self, rows: int) -> int:
        plan = self.plan
        total = rows * plan.length if {"perplexity", "state"} & set(plan.parts) else 0
        if "remembrance" in plan.parts:
            length = plan.remembrance_length
            starts = plan.starts or remembrance_part.default_starts(length)
            total += remembrance_part.tokens_to_read(rows, length, starts)
        if "recall" in plan.parts:
            task = Passkey()
            encode = PieceEncoder(self.tokenizer)
            task.sample(encode, {"length": plan.length, "depth": 0.0}, 0, plan.seed)
            lengths = recall_part.recall_lengths(task, encode, plan.length, plan.training_length)
            total += recall_part.tokens_to_read(lengths, plan.recall_samples, task.depths)
        return total

    @contextmanager
    def _watched(self, part: str) -> Iterator[DivergenceWatch]:
        """Time a part and record what its watch has found."""
        watch = DivergenceWatch(self.model)
        with self.clock.run(part):
            yield watch
        if watch.found is not None:
            self.divergence.append({"part": part, **asdict(watch.found)})

    def _read_text(
        self, ids: NDArray[np.int64], sizes: NDArray[np.int64] | None, advance: Callable[[int], object]
    ) -> dict[str, Any]:
        """Read the windows once for the loss and the state."""
        plan = self.plan
        reader = "perplexity" if "perplexity" in plan.parts else "state"
        edges = position_edges(plan.training_length, plan.length)
        losses = PositionLosses(edges, len(ids), sizes, plan.training_length)
        statistics = StateStatistics(log_positions(plan.length, plan.training_length))
        with self._watched(reader) as watch:
            observers: list[Observer] = [watch]
            if "perplexity" in plan.parts:
                observers.append(losses)
            if "state" in plan.parts:
                observers.append(_Timed(statistics, self.clock, "state", paid_by=reader))
            last_only = "perplexity" not in plan.parts
            columns = segment_size(len(ids), int(self.model.config.vocab_size), plan.batch_tokens, plan.segment_tokens)
            read(self.model, ids, observers, columns, advance, last_only)
        sections: dict[str, Any] = {}
        if "perplexity" in plan.parts:
            sections["perplexity"] = losses.entries(plan.seed)
        if "state" in plan.parts:
            sections["state"] = statistics.entries([layer["mixer"] for layer in self.model.config.layers])
        return sections

    def _remembrance(self, ids: NDArray[np.int64], advance: Callable[[int], object]) -> dict[str, Any]:
        plan = self.plan
        with self._watched("remembrance") as watch:
            return remembrance_part.effective_remembrance(
                self.model,
                ids,
                plan.starts,
                batch_tokens=plan.batch_tokens,
                segment_tokens=plan.segment_tokens,
                seed=plan.seed,
                advance=advance,
                watch=watch,
            )

    def _recall(self, advance: Callable[[int], object]) -> dict[str, Any]:
        plan = self.plan
        with self._watched("recall") as watch:
            return recall_part.recall_length(
                self.model,
                self.tokenizer,
                plan.length,
                plan.training_length,
                samples=plan.recall_samples,
                seed=plan.seed,
                batch_tokens=plan.batch_tokens,
                segment_tokens=plan.segment_tokens,
                advance=advance,
                watch=watch,
            )
