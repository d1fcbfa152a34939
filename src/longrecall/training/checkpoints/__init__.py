"""Resumable checkpoints: everything that a run needs to continue exactly, on any number of processes.

``steps/step-00000100/`` is a checkpoint that loads, with what training needs beside it: the optimizer, one
`process-<rank>.safetensors` for each process (random states, states of the rows that it reads, data position) and
`training_state.json`. A run whose processes hold all weights writes them as a native checkpoint, and the optimizer as
`optimizer.safetensors`; one whose weights are sharded writes both as shards, every process its own (`shards`).

A checkpoint is written by a thread while training goes on (`saver`), into a hidden folder that is renamed when all of
it is on the disk: a folder of this name is whole; the sizes in `training_state.json` prove it again before a resume.
"""

from longrecall.training.checkpoints.consolidating import checkpoint_fingerprint, consolidate, write_final
from longrecall.training.checkpoints.saved_run import (
    STEPS_FOLDER,
    ProcessState,
    SavedRun,
    clear_partial,
    disk_errors,
    drop_old,
    find_saved_runs,
    flatten,
    step_folder,
)
from longrecall.training.checkpoints.saver import Saver, write_model, write_model_in_shards
from longrecall.training.checkpoints.shards import restore_optimizer

__all__ = [
    "STEPS_FOLDER",
    "ProcessState",
    "SavedRun",
    "Saver",
    "checkpoint_fingerprint",
    "clear_partial",
    "consolidate",
    "disk_errors",
    "drop_old",
    "find_saved_runs",
    "flatten",
    "restore_optimizer",
    "step_folder",
    "write_final",
    "write_model",
    "write_model_in_shards",
]
