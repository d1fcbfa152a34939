"""Recording: one path for eager runs and capture, and what a capture that fails leaves behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longrecall.layers.recording import record
from longrecall.ops.execution import shapes_are_fixed

CPU = torch.device("cpu")


class Stream:
    device = CPU

    def wait_stream(self, other: Any) -> None:
        assert other == "current"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Stand-ins for CUDA's side: every capture leaves the generators registered for it."""
    made: list[list[Any]] = []

    class Graph:
        def __init__(self) -> None:
            self.generators: list[Any] = []

        def register_generator_state(self, generator: Any) -> None:
            self.generators.append(generator)

    @contextlib.contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        made.append(graph.generators)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    return made


def test_eager_runs_and_capture_know_that_shapes_are_fixed(captures: list[list[Any]]) -> None:
    seen: list[tuple[bool, int]] = []
    record(lambda: seen.append((shapes_are_fixed(CPU), len(captures))), 2, Stream())  # type: ignore[arg-type]
    assert seen == [(True, 0), (True, 0), (True, 1)] and not shapes_are_fixed(CPU)


def test_a_failed_capture_is_followed_by_one_that_ends(captures: list[list[Any]]) -> None:
    generator = torch.Generator()

    def work() -> None:
        if captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        record(work, 1, Stream(), generators=[generator])  # type: ignore[arg-type]
    assert captures == [[generator], [generator]] and not shapes_are_fixed(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_can_be_drawn_after_a_failed_capture() -> None:
    values = torch.rand(4, device="cuda")

    def work() -> None:
        values.uniform_()
        if torch.cuda.is_current_stream_capturing():
            values.sum().item()

    with pytest.raises(RuntimeError):
        record(work, 1, torch.cuda.Stream())
    assert torch.rand(3, device="cuda").isfinite().all()


def test_autocast_keeps_no_casts_of_weights_for_a_graph(captures: list[list[Any]]) -> None:
    # Kept ones go when autocast ends; the graph would read where they lay.
    seen: list[tuple[bool, bool, torch.dtype]] = []

    def work() -> None:
        cast = torch.get_autocast_dtype("cpu")
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), cast))

    with torch.autocast("cpu", dtype=torch.float16):
        record(work, 1, Stream())  # type: ignore[arg-type]
        assert torch.is_autocast_cache_enabled()
    assert seen == [(True, False, torch.float16)] * 2
    record(work, 0, Stream())  # type: ignore[arg-type]
    assert not seen[-1][0]


def test_recordings_in_threads_follow_each_other(captures: list[list[Any]]) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    threads = [threading.Thread(target=record, args=(work, 1, Stream())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and len(captures) == 3
