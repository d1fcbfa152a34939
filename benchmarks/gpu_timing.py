"""Shared by the GPU benchmarks: medians of CUDA events, the device's copy rate, rows that survive an error."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def median_ms(work: Callable[[], Any], repeats: int = 30, warmup: int = 3) -> float:
    """Median milliseconds of `work` on the current stream."""
    for _ in range(warmup):
        work()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def replayed_ms(work: Callable[[], Any], launches: int = 20, repeats: int = 20) -> float:
    """Median milliseconds of one `work` out of `launches` in a CUDA graph: without the gaps between short launches."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    return median_ms(graph.replay, repeats) / launches


def copy_rate(mebibytes: int = 4096) -> float:
    """Bytes read plus bytes written per second by a large copy on the device."""
    source = torch.randn(mebibytes * 2**18, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (median_ms(lambda: target.copy_(source), repeats=10) / 1e3)


def peak_gib(work: Callable[[], Any]) -> float:
    """Peak memory of `work` in GiB, what was allocated before it included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


class Rows:
    """Named measurements, printed as they come and written to a JSON file after each."""

    def __init__(self, benchmark: str, out: Path | None) -> None:
        self.out = out
        self.result: dict[str, Any] = {
            "schema": 1,
            "benchmark": benchmark,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment(),
            "rows": [],
        }
        print(json.dumps(self.result["environment"]), flush=True)

    def add(self, name: str, **values: Any) -> None:
        """Keep one row and print it."""
        self.result["rows"].append({"name": name, **values})
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(f"{name}: {shown}", flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Add what `work` returns, or the error that stopped it: the other rows still run."""
        try:
            values = work()
        except Exception as error:
            torch.cuda.empty_cache()
            reason = str(error).strip().splitlines()
            values = {"error": f"{type(error).__name__}: {reason[0] if reason else ''}"[:300]}
        self.add(name, **values)


def environment() -> dict[str, Any]:
    """GPU, driver and versions of everything that is measured, peers included."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    peers = ("liger-kernel", "flash-linear-attention", "tilelang", "flash-qla")
    for package in ("torch", "triton", "transformers", "torchao", *peers, "longrecall"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found
