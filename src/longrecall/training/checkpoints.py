"""Resumable checkpoints: a native checkpoint plus everything else that a run needs to continue exactly.

``steps/step-00000100/`` holds the weights, `optimizer.safetensors`, one `process-<rank>.safetensors` for each process
(random states, carried recurrent states, data position) and `training_state.json`. It is written into a hidden folder
and renamed, so a folder of this name is whole; the sizes in `training_state.json` prove it again before a resume.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from longrecall.errors import UserError
from longrecall.files import make_readable
from longrecall.models.checkpoint import Checkpoint, CheckpointWriter
from longrecall.models.recurrent_lm import RecurrentLM

STEPS_FOLDER = "steps"
STATE_FILE = "training_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = re.compile(r"\.+step-\d{8}\.partial.*")
"""Folders of a checkpoint that is being written: of `write_step`, and of the writer of its weights."""

FREE_TO_CHANGE = (
    "run.output", "run.save_every", "run.keep", "run.log_every", "run.threads", "run.report_to", "model.checkpoint",
    "run.compile", "data.workers",
)  # fmt: skip
"""Keys of a recipe that may differ on resume: they change no number beyond the order of float sums."""


class Processes(Protocol):
    """The data-parallel processes of a run, seen from one of them."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def world(self) -> int:
        """Number of processes."""

    @property
    def first(self) -> bool:
        """Whether this process writes what there is only one of."""

    def wait(self) -> None:
        """Return when every process has come here."""


@dataclass
class ProcessState:
    """What one process needs to continue: tensors, and JSON data such as the data position."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedRun:
    """A complete resumable checkpoint on disk."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that had been done."""
        return int(self.state["step"])

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors."""
        return _load(self.folder / OPTIMIZER_FILE)

    def process(self, rank: int) -> ProcessState:
        """Return what process `rank` had saved."""
        path = self.folder / process_file(rank)
        tensors = _load(path)
        with safe_open(path, framework="pt") as file:
            return ProcessState(tensors, json.loads((file.metadata() or {})["data"]))

    def check(self, recipe: Mapping[str, Any], world: int) -> None:
        """Raise UserError when this run would not continue the same training."""
        if self.state["world"] != world:
            raise UserError(
                f"{self.folder} was saved by {self.state['world']} processes and cannot go on with {world}; use as many"
            )
        old, new = flatten(self.state["recipe"]), flatten(recipe)
        for key in sorted(old.keys() | new.keys()):
            if key not in FREE_TO_CHANGE and old.get(key) != new.get(key):
                raise UserError(
                    f"cannot resume {self.folder}: {key} was {old.get(key)!r} and is now {new.get(key)!r}; "
                    "resume with the same recipe or train into another output"
                )


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as dotted path -> value."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    flat: dict[str, Any] = {}
    for key, value in items:
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, (Mapping, list)) else {path: value}
    return flat


def process_file(rank: int) -> str:
    """Return the name of the file of one process."""
    return f"process-{rank:05d}.safetensors"


def step_folder(output: Path, step: int) -> Path:
    """Return where the resumable checkpoint of a step goes."""
    return output / STEPS_FOLDER / f"step-{step:08d}"


def find_saved_runs(output: Path) -> list[SavedRun]:
    """Return the complete resumable checkpoints of a run, oldest first; damaged and half-written ones are left out."""
    found = []
    folder = output / STEPS_FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _NAME.fullmatch(path.name) and (state := _complete(path)) is not None:
            found.append(SavedRun(path, state))
    return found


def _complete(folder: Path) -> dict[str, Any] | None:
    try:
        return _state(folder)
    except OSError:
        return None


def _state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a complete checkpoint, None for a damaged one; OSError when the disk does not say."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        sizes = state["files"]
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if whole and isinstance(state, dict) else None


def write_model(writer: CheckpointWriter, model: RecurrentLM, source: Checkpoint, tokenizer: Any) -> None:
    """Put the weights, the surgery records and the tokenizer of a run into `writer`."""
    tensors = model.state_dict()
    writer.set_config(model.config)
    for name in model.config.tensor_shapes():
        writer.add(name, tensors[name])
    writer.set_surgery(source.surgery)
    writer.set_origin(source.origin)
    companions = source.companion_files()
    writer.add_companions(companions)
    if not any(path.name.startswith("tokenizer") for path in companions):
        tokenizer.save_pretrained(str(writer.folder))


def write_process_file(folder: Path, rank: int, state: ProcessState) -> None:
    """Write the file of one process into the (still hidden) folder."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    path = folder / process_file(rank)
    save_file(tensors, path, metadata={"data": json.dumps(state.data)})
    make_readable(path)


def write_step(
    output: Path,
    step: int,
    write_weights: Callable[[CheckpointWriter], None],
    optimizer: Mapping[str, Tensor] | None,
    own: ProcessState,
    state: Mapping[str, Any],
    processes: Processes,
) -> Path:
    """Write one resumable checkpoint, all processes together; it appears whole at the end or not at all.

    The first process writes weights, optimizer and `state`; every process writes its own file. The processes share a
    file system. Raises UserError, OSError or SafetensorError when the disk refuses; what was written is removed.
    """
    target = step_folder(output, step)
    partial = target.with_name(f".{target.name}.partial")
    try:
        if processes.first:
            with CheckpointWriter(partial, force=True) as writer:
                write_weights(writer)
            save_file(dict(optimizer or {}), partial / OPTIMIZER_FILE)
            make_readable(partial / OPTIMIZER_FILE)
        processes.wait()
        write_process_file(partial, processes.rank, own)
        processes.wait()
        if processes.first:
            sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            text = json.dumps({**state, "step": step, "world": processes.world, "files": sizes}, indent=1)
            (partial / STATE_FILE).write_text(text + "\n", encoding="utf-8")
            # A folder of this name can only be a damaged one: a whole one would have been resumed from.
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        processes.wait()
    except BaseException:
        if processes.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def drop_old(output: Path, keep: int) -> None:
    """Leave the newest `keep` complete checkpoints; remove the others, damaged older ones, and half-written ones.

    Only for the one writer of the run, while no checkpoint is being written.
    """
    clear_partial(output)
    kept = 0
    for folder in sorted((output / STEPS_FOLDER).iterdir(), reverse=True):
        if not _NAME.fullmatch(folder.name):
            continue
        with suppress(OSError):  # one that cannot be read just now is no damaged one
            complete = _state(folder) is not None
            if kept == keep or (kept and not complete):
                shutil.rmtree(folder, ignore_errors=True)
            kept += complete and kept < keep


def clear_partial(output: Path) -> None:
    """Remove the half-written checkpoints that a kill has left; only for the one writer of the run."""
    folder = output / STEPS_FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def disk_errors(what: str, last_good: str) -> Iterator[None]:
    """Turn whatever the disk says while `what` is saved into one line that names the last good checkpoint."""
    try:
        yield
    except (UserError, OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"cannot save {what}: {reason}; last good checkpoint: {last_good}") from error


def random_tensors() -> dict[str, Tensor]:
    """Return the states of torch's global generators."""
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random(tensors: Mapping[str, Tensor]) -> None:
    """Put back what `random_tensors` returned."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}; remove its folder to resume from an older one") from None
