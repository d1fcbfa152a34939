"""Recording work as a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longrecall.ops.execution import fixed_shapes

_one_at_a_time = threading.Lock()
"""A capture begins with waiting for the GPU, which breaks off another one; and all share a stream."""


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: libraries keep a workspace for every stream that they have worked on."""
    return torch.cuda.Stream(device)


def record(
    work: Callable[[], Any],
    warmups: int,
    stream: torch.cuda.Stream,
    *,
    pool: Any = None,
    generators: Sequence[torch.Generator] = (),
) -> torch.cuda.CUDAGraph:
    """Return `work` as a graph, recorded on `stream` after so many eager runs there.

    The eager runs take the same path as the recording, so that kernels are compiled and workspaces allocated in them.

    Args:
        work: without anything that waits for the GPU.
        pool: memory of another graph to share.
        generators: whose numbers `work` draws.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with _one_at_a_time, fixed_shapes(), _no_kept_casts(stream.device), torch.cuda.stream(stream):
        for _ in range(warmups):
            work()
        try:
            # What other threads do meanwhile, on streams of their own, is no business of this capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            _leave_capture(stream, generators)
            raise
    return graph


def _no_kept_casts(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it is, but every use of a weight casts it anew.

    A narrow copy that autocast keeps for later uses goes when autocast ends; a graph would read where it lay.
    """
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)


def _leave_capture(stream: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
    """Take torch's generators out of the capture mode in which a capture that CUDA broke off leaves them.

    They would refuse to draw from then on, also for those who go on without a graph. A capture that ends well, of next
    to nothing, sets them right.
    """
    graph, buffer = torch.cuda.CUDAGraph(), torch.zeros(1, device=stream.device)
    for generator in generators:
        graph.register_generator_state(generator)
    with contextlib.suppress(RuntimeError), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        buffer.add_(1)
