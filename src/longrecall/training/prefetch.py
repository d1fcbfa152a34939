"""Batches read ahead by processes of their own, so that no step waits for a tokenizer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from longrecall.errors import UserError

AHEAD = 8
"""Batches that every worker may be ahead of the one that is trained on: as many as a row has lanes."""
_MOST_BY_DEFAULT = 4
_PARALLELISM = "TOKENIZERS_PARALLELISM"


class Rows(Protocol):
    """A stream of batches that can be read by rows (`training.data.BatchStream`)."""

    def rows_of_worker(self, batch: int, worker: int, workers: int) -> list[int]:
        """Return the rows of a batch that one of several workers reads."""

    def read_rows(self, batch: int, rows: Sequence[int]) -> list[Any]:
        """Return these rows of a batch."""


def default_workers() -> int:
    """Return the workers of a process that a recipe says nothing of: none on a CPU, which is busy with the training."""
    if not torch.cuda.is_available():
        return 0
    return max(1, min(_MOST_BY_DEFAULT, usable_cores() // max(1, torch.cuda.device_count()) - 1))


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Parts(IterableDataset[Any]):
    """In worker w of n: its part of every batch, from a batch on. An error of the user's is given as its line."""

    def __init__(self, stream: Rows, batch: int) -> None:
        self._stream, self._batch = stream, batch

    def __iter__(self) -> Iterator[list[Any] | str]:
        info = get_worker_info()
        if info is None:
            raise RuntimeError("this runs in a worker")
        batch = self._batch
        while True:
            try:
                rows = self._stream.rows_of_worker(batch, info.id, info.num_workers)
                part = self._stream.read_rows(batch, rows)
            except UserError as error:
                yield str(error)
                return
            yield part
            batch += 1


def read_beside(stream: Rows, batch: int, workers: int) -> Iterator[list[Any]]:
    """Give the rows of batch number `batch` of a stream, of the next one, and so on, read by `workers` processes.

    Each worker reads the lanes that are its own, for every batch, so the order does not depend on their number.

    Raises:
        UserError: what a worker says about the data; a worker that was killed.
    """
    with single_threads(), warnings.catch_warnings():
        # More workers than cores, and a fork beside other threads: the workers run nothing of those.
        warnings.simplefilter("ignore")
        parts = iter(_loader(stream, batch, workers))
    while True:
        rows: list[Any] = []
        for _ in range(workers):
            try:
                part = next(parts)
            except RuntimeError as error:
                if "DataLoader worker (pid" not in str(error):
                    raise
                raise UserError(
                    f"a data worker has ended ({' '.join(str(error).split())}); most often memory ran out: "
                    "lower data.workers and --resume"
                ) from None
            if isinstance(part, str):
                raise UserError(part)
            rows += part
        yield rows


def _loader(stream: Rows, batch: int, workers: int) -> DataLoader[Any]:
    return DataLoader(
        _Parts(stream, batch),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD,
        collate_fn=_as_it_is,
        # A generator of its own: DataLoader would otherwise draw from the global one when it starts.
        generator=torch.Generator(),
        multiprocessing_context=multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn"),
    )


@contextlib.contextmanager
def single_threads() -> Iterator[None]:
    """Let the processes that are started inside tokenise with one thread each; as many as cores would be in the way."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _as_it_is(part: Any) -> Any:
    return part
