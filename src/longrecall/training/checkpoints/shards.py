"""Tensors of which every process writes and reads its own part: torch's distributed checkpoint over safetensors.

Torch plans who writes which part (of a tensor that several processes hold, one of them writes it) and who reads what
after a change of the number of processes. The files are ours: safetensors with one JSON index (`formats.pieces`), never
pickle, so that a checkpoint of somebody else runs no code, and any process reads any part of any tensor.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from longrecall.files import make_readable
from longrecall.models.formats.pieces import SHARDS_INDEX, StoredTensors, piece_key
from longrecall.models.formats.shards import reason_of

FILE_BYTES = 1 << 30
"""A process begins another file before it has written so much: safetensors takes a copy of a file in memory."""


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this process holds a part of some tensor only."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write_shards(folder: Path, tensors: Mapping[str, Tensor], rank: int, group: ProcessGroup) -> None:
    """Write tensors into `folder`, each process what it holds of them; all processes of `group` call this together.

    Raises:
        CheckpointException: in every process, when one of them could not write (`failures` of it says why).
    """
    save(dict(tensors), storage_writer=_Writer(folder, rank), process_group=group)


def fill(targets: Mapping[str, Tensor], stored: StoredTensors) -> None:
    """Read into `targets`, which may be sharded and are changed in place, no more than this process holds of them.

    Raises:
        UserError: a file cannot be read.
    """
    if not targets:
        return
    with warnings.catch_warnings():
        # Nothing needs to be agreed on: every process reads for itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(dict(targets), storage_reader=_Reader(stored), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, stored: StoredTensors) -> None:
    """Give an optimizer the state that was saved as ``{parameter}#{entry}``, sharded as the parameters now are."""
    parameters = dict(model.named_parameters())
    targets: dict[str, Tensor] = {}
    for full in stored.names():
        name, _, key = full.partition("#")
        parameter, shape, dtype = parameters[name], stored[full].shape, stored.dtype(full)
        if shape == tuple(parameter.shape):
            targets[full] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            targets[full] = torch.empty(shape, dtype=dtype, device=parameter.device)
        optimizer.state[parameter][key] = targets[full]
    fill(targets, stored)


class _Writer(StorageWriter):
    """Writes this process's parts; the first process also the index, once all have written theirs."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to forget: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts that the plan gives this process, a file after the other."""
        results: list[WriteResult] = []
        parts: dict[str, Tensor] = {}
        size = number = 0
        for item in plan.items:
            part: Any = planner.resolve_data(item)
            if size and size + part.nbytes > FILE_BYTES:
                self._write(number, parts)
                parts, size, number = {}, 0, number + 1
            parts[piece_key(item.index.fqn, item.index.offset or ())] = part.detach().contiguous()
            size += part.nbytes
            results.append(WriteResult(item.index, part.nbytes, (self._file(number), list(part.shape))))
        if parts:
            self._write(number, parts)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _file(self, number: int) -> str:
        return f"shard-{self._rank:05d}-{number:03d}.safetensors"

    def _write(self, number: int, parts: dict[str, Tensor]) -> None:
        path = self._folder / self._file(number)
        try:
            save_file(parts, path)
        except SafetensorError as error:
            # What goes to the other processes is pickled, which this error does not survive.
            raise OSError(None, reason_of(error)) from None
        make_readable(path)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        files: dict[str, int] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(about, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
            dtype = str(about.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(about.size), "pieces": []}
        for result in (result for own in results for result in own):
            file, shape = result.storage_data
            if 0 not in shape:
                piece = [files.setdefault(file, len(files)), list(result.index.offset or ()), shape]
                tensors[result.index.fqn]["pieces"].append(piece)
        index = {"schema": 1, "files": list(files), "tensors": tensors}
        (self._folder / SHARDS_INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders are given to the constructor alone."""
        return False


class _Reader(StorageReader):
    """Reads what a plan asks for out of `StoredTensors`."""

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe every tensor as one part: the pieces that it lies in are found when it is read."""
        return Metadata({name: self._described(name) for name in self._stored.names()})

    def _described(self, name: str) -> TensorStorageMetadata:
        size = torch.Size(self._stored[name].shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=self._stored.dtype(name)), size, [whole])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The files are open already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts, one at a time."""
        for item in plan.items:
            part = self._stored.read(item.storage_index.fqn, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Files are given to the constructor alone."""
        return False
