"""What lies in the folder of a run: which checkpoints are complete, and what they hold for a process that resumes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from longrecall.errors import RefusedTogether, UserError
from longrecall.models.formats.pieces import SHARDS_INDEX, Piece, Stored, StoredTensors
from longrecall.models.formats.shards import reason_of
from longrecall.training.data import join_positions
from longrecall.training.initial_states import is_of_rows
from longrecall.training.loss_sums import SUMS
from longrecall.training.recipe import Recipe

STEPS_FOLDER = "steps"
STATE_FILE = "training_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
OPTIMIZER = "optimizer/"
"""How the names of the optimizer's tensors begin where they lie among others."""
CARRIED = "initial_state."
"""How the names of an intervention's tensors begin in the file of a process."""
_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = re.compile(r"\.+step-\d{8}\.partial.*")
"""Folders of a checkpoint that is being written: of the `Saver`, and of the writer of its weights."""

FREE_TO_CHANGE = (
    "run.output", "run.save_every", "run.keep", "run.log_every", "run.threads", "run.report_to", "model.checkpoint",
    "run.compile", "data.workers", "leash.teacher", "parallel.replicate", "parallel.shard", "parallel.context",
)  # fmt: skip
"""Keys of a recipe that may differ on resume: they change no number beyond the order of float sums."""


class Processes(Protocol):
    """The processes of a run, seen from one of them. Neighbours may read the same rows: context parallelism."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def world(self) -> int:
        """Number of processes."""

    @property
    def data_rank(self) -> int:
        """Number of this process's rows: it reads rows from data_rank x batch_size on."""

    @property
    def data_world(self) -> int:
        """Number of processes that read rows of their own."""

    @property
    def first(self) -> bool:
        """Whether this process writes what there is only one of."""


@dataclass
class ProcessState:
    """What one process needs to continue: tensors, and JSON data such as the data position."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedRun:
    """A complete resumable checkpoint on disk, however many processes have written it and however they held it."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that had been done."""
        return int(self.state["step"])

    @property
    def world(self) -> int:
        """Processes that have saved it."""
        return int(self.state["world"])

    @property
    def data_world(self) -> int:
        """Those of them that read rows of their own."""
        return int(self.state.get("data_world", self.world))

    @property
    def rows(self) -> int:
        """Rows in a batch of all processes."""
        return int(self.state["recipe"]["run"]["batch_size"]) * self.data_world

    @property
    def sharded(self) -> bool:
        """Whether every process has written its own part of the weights."""
        return SHARDS_INDEX in self.state["files"]

    @cached_property
    def optimizer(self) -> StoredTensors:
        """The optimizer's tensors as ``{parameter}#{entry}``, none of them read yet."""
        with self._readable():
            if self.sharded:
                return StoredTensors.of_shards(self.folder).within(OPTIMIZER)
            return StoredTensors.of_files({"": self.folder / OPTIMIZER_FILE})

    def process(self, rank: int) -> ProcessState:
        """Return what process `rank` had saved."""
        path = self.folder / process_file(rank)
        tensors = _load(path)
        with safe_open(path, framework="pt") as file:
            return ProcessState(tensors, json.loads((file.metadata() or {})["data"]))

    def share_of(self, processes: Processes) -> ProcessState:
        """Return what this process needs to continue: what it had saved, or its share where there were others.

        With another number of processes than before, the rows are dealt out anew, sums become their mean, and random
        generators those of the first process.

        Raises:
            UserError: a file cannot be read, or the files of the processes do not belong together.
        """
        alike = (self.world, self.data_world) == (processes.world, processes.data_world)
        own = self.process(processes.rank if alike else 0)
        if not alike:
            others = [self.process(rank) for rank in range(1, self.world)]
            places = [own.data["position"], *(other.data["position"] for other in others)]
            if all("covers" in place for place in places):  # else an older version's, which the stream refuses
                own.data["position"] = join_positions(places)
            for name in own.tensors.keys() & set(SUMS.values()):
                both = [own.tensors[name], *(other.tensors[name] for other in others)]
                own.tensors[name] = torch.stack(both).double().mean(0).to(own.tensors[name].dtype)
        rows = self.rows // processes.data_world
        with self._readable():
            for name, stored in self._row_tensors.items():
                first, rest = processes.data_rank * rows, stored.shape[1:]
                share = StoredTensors({name: stored}).read(name, (first, *[0] * len(rest)), (rows, *rest))
                own.tensors[name] = share
        return own

    @property
    def _row_tensors(self) -> dict[str, Stored]:
        """The states of all rows of a batch: each a tensor of which every process has saved its rows."""
        found: dict[str, Stored] = {}
        # Of processes that read the same rows the first has saved them.
        writers = range(0, self.world, self.world // self.data_world)
        for rank in writers:
            path = self.folder / process_file(rank)
            file = StoredTensors.of_files({"": path})
            for name in file.names():
                if name.startswith(CARRIED) and is_of_rows(name.removeprefix(CARRIED)):
                    part = file[name]
                    before = found.get(name, Stored(part.dtype, (0, *part.shape[1:]), ()))
                    piece = Piece(path, name, (before.shape[0], *[0] * len(part.shape[1:])), part.shape)
                    shape = (before.shape[0] + part.shape[0], *part.shape[1:])
                    found[name] = Stored(part.dtype, shape, (*before.pieces, piece))
        return found

    def fit(self, recipe: Recipe, data_world: int) -> Recipe:
        """Return the recipe by which `data_world` processes, each with rows of its own, continue the same training.

        The rows of a batch of all processes stay: each of them gets its share.

        Raises:
            UserError: it would not be the same training, or the processes cannot share the rows.
        """
        old, new = flatten(_complete_recipe(self.state["recipe"])), flatten(recipe.to_dict())
        if self.rows % data_world:
            raise UserError(
                f"{self.folder} was saved with {self.rows} rows in a batch of all processes, which {data_world} "
                f"processes cannot share equally; resume with a number of processes that divides {self.rows}"
            )
        share = self.rows // data_world
        if new["run.batch_size"] == share:
            old["run.batch_size"] = share
        for key in sorted(old.keys() | new.keys()):
            if key not in FREE_TO_CHANGE and old.get(key) != new.get(key):
                raise UserError(
                    f"cannot resume {self.folder}: {key} was {old.get(key)!r} and is now {new.get(key)!r}; "
                    "resume with the same recipe or train into another output"
                )
        return replace(recipe, run=replace(recipe.run, batch_size=share))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"{error}; remove {self.folder} to resume from an older one") from None


def _complete_recipe(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recipe as an older version saved it, with the defaults of the keys that it did not know."""
    try:
        return Recipe.from_dict(dict(saved)).to_dict()
    except UserError:
        return saved


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
        if _NAME.fullmatch(path.name) and (saved := saved_run(path)) is not None:
            found.append(saved)
    return found


def saved_run(folder: Path) -> SavedRun | None:
    """Return the resumable checkpoint in the folder of a step; None when it is damaged, half-written, or none."""
    state = _complete(folder)
    return None if state is None else SavedRun(folder, state)


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
        line = f"cannot save {what}: {reason_of(error)}; last good checkpoint: {last_good}"
        if isinstance(error, RefusedTogether):
            raise RefusedTogether(line, told_here=error.told_here) from error
        raise UserError(line) from error


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
