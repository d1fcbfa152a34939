"""Writes resumable checkpoints while training goes on: copied at once, written by a thread, whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from longrecall.errors import RefusedTogether, UserError
from longrecall.files import make_readable
from longrecall.models.checkpoint import Checkpoint, CheckpointWriter
from longrecall.models.formats.pieces import MODEL
from longrecall.models.formats.shards import reason_of
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.checkpoints.saved_run import (
    CARRIED,
    OPTIMIZER,
    OPTIMIZER_FILE,
    STATE_FILE,
    Processes,
    ProcessState,
    disk_errors,
    drop_old,
    process_file,
    step_folder,
)
from longrecall.training.checkpoints.shards import is_sharded, write_shards
from longrecall.training.initial_states import is_of_rows
from longrecall.training.watch import FiniteWatch


@dataclass(frozen=True)
class _Snapshot:
    """Copies, on the CPU, of what this process writes of a step."""

    step: int
    tensors: dict[str, Tensor]
    """Weights and optimizer; names as in a file of shards."""
    own: ProcessState
    state: dict[str, Any]
    sharded: bool


class Saver:
    """Saves steps of a run, all processes together, each what it holds.

    `save` returns when everything has been copied; a thread writes it. A second `save` waits for the first. What the
    disk says against it comes out of the next `save`, `settle` or `wait`, in every process.

    All processes of a run make theirs together, before training begins.

    Args:
        output: of the run.
        keep: so many complete checkpoints stay.
        source, tokenizer: what the run started from: surgery records, origin and tokenizer files travel on.
        model: whose weights are saved.
        processes: of the run.
        watch: is told of each complete checkpoint, by the thread.
    """

    def __init__(
        self,
        output: Path,
        keep: int,
        source: Checkpoint,
        tokenizer: Any,
        model: RecurrentLM,
        processes: Processes,
        watch: FiniteWatch,
    ) -> None:
        self._output, self._keep, self._source, self._tokenizer = output, keep, source, tokenizer
        self._model, self._processes, self._watch = model, processes, watch
        watch.before_error = self._let_finish
        self._step = 0
        self._pending: Future[None] | None = None
        self._group: ProcessGroup | None = None
        if torch.distributed.is_initialized():
            # Of its own: the thread must not get between the messages of training. On the CPU, as what it sends is.
            # Made now: while processes look for each other, one that dies is waited for.
            self._group = torch.distributed.new_group(backend="gloo")

    def save(self, step: int, optimizer: torch.optim.Optimizer, own: ProcessState, state: Mapping[str, Any]) -> None:
        """Begin to save a step.

        Args:
            step: optimizer steps done.
            optimizer: of the model.
            own: what this process needs to continue.
            state: what all need: JSON data.

        Raises:
            UserError: the step before could not be saved.
        """
        self.wait()
        snapshot = self._copy(step, optimizer, own, state)
        done: Future[None] = Future()

        def write() -> None:
            try:
                self._write(snapshot)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        # A daemon: where another process has died, what waits for it must not keep this one.
        thread = threading.Thread(target=write, name="saver", daemon=True)
        self._step, self._pending = step, done
        try:
            thread.start()
        except RuntimeError as error:
            # The system has no more threads to give: nobody is to wait for this one.
            done.set_exception(error)
            raise

    def wait(self) -> None:
        """Return when what was begun is saved; raise UserError when it could not be."""
        if self._pending is not None:
            with disk_errors(f"step {self._step}", self._watch.last_good):
                # Ctrl-C may come here: what is being written is forgotten once it is written, and not before.
                self._pending.exception()
                pending, self._pending = self._pending, None
                pending.result()

    def settle(self, mean: Callable[[Tensor], float]) -> None:
        """As `wait`, if every process has finished; all call this in the same step. `mean`: over the processes."""
        if self._pending is not None and mean(torch.tensor(float(self._pending.done()))) == 1.0:
            self.wait()

    def close(self, patience: float | None = None) -> None:
        """Let the thread write what was begun, also after an error, and say nothing of its own.

        `patience`: seconds after which it is left alone; None = it is waited for.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            wait([pending], timeout=patience)

    def _let_finish(self) -> None:
        if self._pending is not None:
            wait([self._pending])

    def _copy(
        self, step: int, optimizer: torch.optim.Optimizer, own: ProcessState, state: Mapping[str, Any]
    ) -> _Snapshot:
        weights = self._model.state_dict()
        tensors = {MODEL + name: weights[name].detach() for name in self._model.config.tensor_shapes()}
        sharded = is_sharded(tensors)
        tensors |= {OPTIMIZER + name: value for name, value in optimizer_state(self._model, optimizer).items()}
        if sharded:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            tensors = cast("dict[str, Tensor]", stager.stage(tensors))
            stager.close()
        else:
            tensors = {n: t.to("cpu", copy=True) for n, t in tensors.items()} if self._processes.first else {}
        # Processes that read the same rows carry the same states: the first of them saves them.
        neighbours = self._processes.world // self._processes.data_world
        kept = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in own.tensors.items()
            if self._processes.rank % neighbours == 0 or not is_of_rows(name.removeprefix(CARRIED))
        }
        about = {"step": step, "world": self._processes.world, "data_world": self._processes.data_world}
        return _Snapshot(step, tensors, ProcessState(kept, own.data), {**state, **about}, sharded)

    def _write(self, snapshot: _Snapshot) -> None:
        """Write a step; it appears whole at the end or not at all."""
        target = step_folder(self._output, snapshot.step)
        partial = target.with_name(f".{target.name}.partial")
        try:
            self._together(lambda: self._describe(partial, snapshot), only_first=True)
            if snapshot.sharded:
                _write_parts(partial, snapshot.tensors, self._processes, self._group)
            self._together(lambda: self._add_own(partial, snapshot))
            self._together(lambda: self._publish(partial, target, snapshot), only_first=True)
        except BaseException:
            if self._processes.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._watch.last_good = str(target)

    def _describe(self, partial: Path, snapshot: _Snapshot) -> None:
        """Make the hidden folder: a native checkpoint, whose weights are shards where they are."""
        weights = {n.removeprefix(MODEL): t for n, t in snapshot.tensors.items() if n.startswith(MODEL)}
        with CheckpointWriter(partial, force=True) as writer:
            if snapshot.sharded:
                _describe_shards(writer, self._model, self._source, self._tokenizer, weights)
            else:
                write_model(writer, self._model, self._source, self._tokenizer, weights)
        if not snapshot.sharded:
            rest = {n.removeprefix(OPTIMIZER): t for n, t in snapshot.tensors.items() if n.startswith(OPTIMIZER)}
            save_file({name: tensor.contiguous() for name, tensor in rest.items()}, partial / OPTIMIZER_FILE)
            make_readable(partial / OPTIMIZER_FILE)

    def _add_own(self, partial: Path, snapshot: _Snapshot) -> None:
        rank = self._processes.rank
        path = partial / process_file(rank)
        save_file(snapshot.own.tensors, path, metadata={"data": json.dumps(snapshot.own.data)})
        make_readable(path)
        for mine in (path, *partial.glob(f"shard-{rank:05d}-*")):
            _flush(mine)

    def _publish(self, partial: Path, target: Path, snapshot: _Snapshot) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir()) if path.is_file()}
        text = json.dumps({**snapshot.state, "files": sizes}, indent=1)
        (partial / STATE_FILE).write_text(text + "\n", encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        # A folder of this name can only be a damaged one: a whole one would have been resumed from.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _flush(target.parent)
        drop_old(self._output, self._keep)

    def _together(self, action: Callable[[], None], only_first: bool = False) -> None:
        """Do something in every process, or in the first; raise in all of them when it fails in one."""
        failure: Exception | None = None
        try:
            if self._processes.first or not only_first:
                action()
        except Exception as error:
            failure = error
        if self._group is None:
            if failure is not None:
                raise failure
            return
        reasons: list[str | None] = [None] * self._processes.world
        own = None if failure is None else reason_of(failure)
        torch.distributed.all_gather_object(reasons, own, group=self._group)
        if failure is not None and not isinstance(failure, (UserError, OSError, SafetensorError)):
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise _refusal(self._processes, rank, reason)


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's tensors, no copies, as ``{parameter}#{entry}``."""
    return {
        f"{name}#{key}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def write_model(
    writer: CheckpointWriter,
    model: RecurrentLM,
    source: Checkpoint,
    tokenizer: Any,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Put the weights, the surgery records and the tokenizer of a run into `writer`.

    `tensors`: copies of the weights; None = those of the model as they are.
    """
    tensors = model.state_dict() if tensors is None else tensors
    writer.set_config(model.config)
    for name in model.config.tensor_shapes():
        writer.add(name, tensors[name])
    _add_companions(writer, source, tokenizer)


def write_model_in_shards(
    folder: Path, model: RecurrentLM, source: Checkpoint, tokenizer: Any, processes: Processes
) -> None:
    """Write sharded weights into `folder`, each process what it holds; all processes call this together.

    The folder is a checkpoint that opens, to be assembled by `write_final`. What was there is replaced.

    Raises:
        UserError: in every process, when one of them could not write.
    """
    weights = model.state_dict()
    tensors = {name: weights[name].detach() for name in model.config.tensor_shapes()}
    failure: list[str | None] = [None]
    if processes.first:
        try:
            with CheckpointWriter(folder, force=True) as writer:
                _describe_shards(writer, model, source, tokenizer, tensors)
        except (UserError, OSError) as error:
            failure = [reason_of(error)]
    torch.distributed.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise _refusal(processes, 0, failure[0])
    named = {MODEL + name: tensor for name, tensor in tensors.items()}
    _write_parts(folder, named, processes, torch.distributed.group.WORLD)


def _describe_shards(
    writer: CheckpointWriter, model: RecurrentLM, source: Checkpoint, tokenizer: Any, weights: Mapping[str, Tensor]
) -> None:
    """Put everything but the weights into `writer`: shards of them will lie beside it."""
    writer.set_config(model.config)
    writer.set_elsewhere({name: tensor.dtype for name, tensor in weights.items()})
    _add_companions(writer, source, tokenizer)


def _write_parts(folder: Path, tensors: Mapping[str, Tensor], processes: Processes, group: ProcessGroup | None) -> None:
    """Write what this process holds; raise UserError in all of them when one could not."""
    if group is None:
        raise RuntimeError("sharded weights come with a process group")
    try:
        write_shards(folder, tensors, processes.rank, group)
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        if not isinstance(failure, (UserError, OSError)):
            raise failure from None
        raise _refusal(processes, rank, reason_of(failure)) from None


def _refusal(processes: Processes, rank: int, reason: str) -> RefusedTogether:
    """What every process raises for what went wrong in one of them."""
    line = reason if rank == 0 else f"process {rank}: {reason}"
    return RefusedTogether(line, told_here=processes.first)


def _add_companions(writer: CheckpointWriter, source: Checkpoint, tokenizer: Any) -> None:
    writer.set_surgery(source.surgery)
    writer.set_origin(source.origin)
    companions = source.companion_files()
    writer.add_companions(companions)
    if not any(path.name.startswith("tokenizer") for path in companions):
        tokenizer.save_pretrained(str(writer.folder))


def _flush(path: Path) -> None:
    """Return when a file, or which files a folder has, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
