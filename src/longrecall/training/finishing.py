"""The end of a run: the trained checkpoint, a learned initial state, and the result file."""

from __future__ import annotations

import math
from dataclasses import replace

from longrecall.models.checkpoint import CheckpointWriter, open_checkpoint
from longrecall.models.loading import start_of_text
from longrecall.surgery.handover import handover_layers
from longrecall.training.checkpoints import (
    checkpoint_fingerprint,
    disk_errors,
    find_saved_runs,
    write_final,
    write_model,
)
from longrecall.training.evaluation import described, parted_log
from longrecall.training.initial_states import Learned
from longrecall.training.job import Job
from longrecall.training.logs import RESULT_FILE, write_result
from longrecall.training.summary import TrainingSummary

FINAL_FOLDER = "final"
LEARNED_STATE_FILE = "initial_state.safetensors"
"""Beside `FINAL_FOLDER`: a learned initial state, for ``generate --load-state``."""


def finish(job: Job, summary: TrainingSummary, seconds: float) -> TrainingSummary:
    """Write the final checkpoint and training.json; return the completed summary."""
    rows = [row for row in job.log.rows if "loss" in row]
    job.set_handover(job.steps)
    learned = job.initial if isinstance(job.initial, Learned) else None
    done = replace(
        described(summary, job.evaluation),
        resumed_from=job.saved.step if job.saved is not None else 0,
        first_loss=rows[0]["loss"] if rows else None,
        last_loss=rows[-1]["loss"] if rows else None,
        seconds=round(seconds, 3),
        initial_state=str(job.output / LEARNED_STATE_FILE) if learned is not None else None,
    )
    if learned is not None:
        learned.release()
    with job.processes.together():
        if job.processes.first:
            _write_results(job, learned, done)
    return done


def _write_results(job: Job, learned: Learned | None, summary: TrainingSummary) -> None:
    """Write what a run leaves beside its steps: the final checkpoint, a learned state, training.json."""
    final = job.output / FINAL_FOLDER
    streamed = job.processes.sharded or bool(handover_layers(job.model.config))
    with disk_errors("the final checkpoint", job.watch.last_good):
        if streamed:
            write_final(find_saved_runs(job.output)[-1].folder, final, force=True)
        else:
            with CheckpointWriter(final, force=True) as writer:
                write_model(writer, job.model, job.source, job.tokenizer)
    trained = open_checkpoint(final)
    fingerprint = checkpoint_fingerprint(trained) if streamed else job.model.fingerprint()
    if learned is not None:
        zero = start_of_text(trained) if streamed else job.model.zero_state(1)
        learned.save(job.output / LEARNED_STATE_FILE, zero, fingerprint)
    body = {
        "checkpoint": {
            "path": str(final),
            "fingerprint": fingerprint,
            "parameters": sum(math.prod(shape) for shape in trained.config.tensor_shapes().values()),
            "state_size": trained.config.state_size(),
            "surgery": trained.surgery,
        },
        "source": {"path": str(job.source.path), "sha256": job.source.sha256()},
        "recipe": job.recipe.to_dict(),
        **parted_log(job.log.rows, job.evaluation),
        "summary": summary.to_dict(),
    }
    write_result(job.output / RESULT_FILE, body)
