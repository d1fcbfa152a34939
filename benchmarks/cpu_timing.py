"""Shared by the CPU benchmarks: first options, agreement, who else keeps the cores busy, the file of a result.

A script that imports this sets OMP_WAIT_POLICY before it imports torch. Threads that wait for each other then sleep
instead of spinning. Beside other work on the same cores a spinning thread holds up the one it waits for, and the times
of both sides grow tenfold at random. On a quiet machine set OMP_WAIT_POLICY=active: both sides take up to 1.7 times
less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrecall import __version__


def peak_rss() -> float:
    """Peak resident memory of this process in MiB; VmHWM, because ru_maxrss is inherited from the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def cpu_parser(about: str | None, threads: int) -> argparse.ArgumentParser:
    """A parser with the number of threads and the place of the result."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of any output or gradient, relative to the largest entry of that tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def ratio_of(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Median, least and largest of the ratios of neighbours."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


class OtherPrograms:
    """How many cores other programs keep busy, from the making of this object on."""

    def __init__(self) -> None:
        self.began, self.machine, self.own = time.perf_counter(), *processor_seconds()

    def cores(self) -> float:
        """Their processor seconds for each second since then; says so on the screen as well."""
        machine, own = processor_seconds()
        busy = ((machine - self.machine) - (own - self.own)) / (time.perf_counter() - self.began)
        print(f"meanwhile other processes kept {busy:.1f} of {os.cpu_count()} cores busy")
        return round(max(busy, 0.0), 2)


def processor_seconds() -> tuple[float, float]:
    """Processor time used so far by the whole machine, and by this process and its ended children."""
    user, nice, system = (int(x) for x in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def recorded(
    options: argparse.Namespace, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    """The result of a benchmark, with `more` fields of its own; written to `options.out` if there is one."""
    result = {
        "schema": 1,
        "kind": "benchmark",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "longrecall": __version__,
        "environment": environment(options.threads),
        "settings": {"dtype": "float32", **settings},
        "results": list(rows),
        **more,
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def environment(threads: int) -> dict[str, Any]:
    """What the times depend on besides the code."""
    import transformers

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")),
        platform.processor(),
    )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": f"{cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": threads,
        "omp_wait_policy": os.environ["OMP_WAIT_POLICY"],
    }
