"""Where evaluation meets the training loop: after a step it is measured, logged, judged, and the best model written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from transformers import Trainer

from longrecall.layers.handover import Handover
from longrecall.models.checkpoint import Checkpoint, CheckpointWriter
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.new_folder import clear_remains
from longrecall.surgery.handover import handover_layers
from longrecall.training.checkpoints import disk_errors, write_final, write_model, write_model_in_shards
from longrecall.training.evaluation import Share, TrainingEvaluation
from longrecall.training.initial_states import InitialState
from longrecall.training.logs import RunLog, Stopwatch
from longrecall.training.parallel.place import Place
from longrecall.training.watch import FiniteWatch

BEST_FOLDER = "best"
"""Of a run: the native checkpoint with the best metric."""
UNFINISHED_BEST = ".best.unfinished"
"""The same before its shards are put together and its handover layers finished."""


class Training(Protocol):
    """What an evaluation sees of a run."""

    evaluation: TrainingEvaluation | None
    output: Path
    model: RecurrentLM
    source: Checkpoint
    tokenizer: Any
    initial: InitialState
    log: RunLog
    watch: FiniteWatch
    handovers: list[Handover]

    processes: Place

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of all processes."""


def evaluate_after(
    run: Training,
    trainer: Trainer,
    clock: Stopwatch,
    step: int,
    last: bool,
    progress: float,
    release: Callable[[], None] = lambda: None,
) -> bool:
    """Evaluate where it is time to; return whether training has to end. Every process of the run calls this.

    Args:
        clock: stands still meanwhile.
        step: done so far; 0 = before the first.
        last: it was the last one.
        progress: of the handover; it says nothing of a model without one.
        release: gives back memory that steps keep, before anything is measured.
    """
    evaluation = run.evaluation
    if evaluation is None or not evaluation.due(step, last):
        return False
    release()
    run.watch.check()
    place = run.processes
    with clock.paused():
        share = Share(
            place.rank, place.world, place.sharded,
            lambda tensor: trainer.accelerator.reduce(tensor, "sum") if place.world > 1 else tensor,
        )  # fmt: skip
        own = evaluation.measure(run.model, run.initial, share, trainer.compute_loss_context_manager)
        # Where each process asks everything, kernels that add up in an order of their own may tell them different
        # numbers. Whether to stop, and what is best, must be one decision: those of the first count.
        numbers = place.gather(own)[0]
        best = evaluation.judge(step, numbers, counts=progress == 1.0 or not run.handovers)
        if best and evaluation.recipe.best:
            with place.together(), disk_errors("the best checkpoint", run.watch.last_good):
                _write_best(run, run.output / BEST_FOLDER)
    if place.first:
        run.log.add({"step": step, "tokens": step * run.tokens_per_step, "evaluation": numbers})
    # What begins with eval_ has a page of its own in TensorBoard and W&B.
    trainer.log({f"eval_{name}": value for name, value in numbers.items() if value is not None})
    return evaluation.standing.stopped


def clear_best(output: Path) -> None:
    """Remove what a kill has left of a best checkpoint that was being written."""
    clear_remains(output / BEST_FOLDER)
    shutil.rmtree(output / UNFINISHED_BEST, ignore_errors=True)


def _write_best(run: Training, folder: Path) -> None:
    """Write the model as a native checkpoint without handover layers, in place of the one that was best before.

    Sharded weights are written by those who hold them and assembled tensor by tensor: no process ever holds the model.
    """
    place, raw = run.processes, folder.with_name(UNFINISHED_BEST)
    handover = bool(handover_layers(run.model.config))
    try:
        if place.sharded:
            write_model_in_shards(raw, run.model, run.source, run.tokenizer, place)
        elif place.first:
            with CheckpointWriter(raw if handover else folder, force=True) as writer:
                write_model(writer, run.model, run.source, run.tokenizer)
        if place.first and (place.sharded or handover):
            write_final(raw, folder, force=True)
    finally:
        if place.first:
            shutil.rmtree(raw, ignore_errors=True)
