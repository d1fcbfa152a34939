"""Compile what gpu_peers.py and the layers of gpu_layers.py need, into the caches of Triton and TileLang on disk.

    python benchmarks/gpu_peers.py --compile-only --seconds 300 --processes 12

Processes work side by side; one that is killed leaves what it had finished. Each is this file with one case or layer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_peer_cases import CASES, LAYER_PEERS, LAYERS, layer_step, served, step

from longrecall.ops import peers

SHARDS = 3
"""Processes that share the configurations which one op of a peer tries."""


def to_compile(wanted: list[int]) -> list[tuple[str, str, int]]:
    """Case or layer, backend and shard of every process: peers, which compile longest, once for each kind; then ours.

    The repeated values of a layer's subheads are compiled with its 64 heads. Layers ("E=8"), which give no state before
    the first token, and what else another length or number of rows may need compiled come last.
    """
    first: list[tuple[str, str, int]] = []
    rest: list[tuple[str, str, int]] = []
    seen = set()
    for n, case in ((str(n), CASES[n]) for n in wanted):
        new = case.kind not in seen and case.op != "subhead_delta_rule"
        seen.add(case.kind)
        backends = served(case)
        if new and "fla" in backends:
            first += [(n, "fla", shard) for shard in range(SHARDS)]
        if "flash_qla" in backends:
            (first if new else rest).append((n, "flash_qla", 0))
    here = [name for name in LAYER_PEERS if peers.why_not_here(name) is None]
    for name, factor in itertools.product(here, LAYERS):
        rest += [(f"E={factor}", name, shard) for shard in range(SHARDS if name == "fla" else 1)]
    return [*first, *((str(n), "ours", 0) for n in wanted), *rest]


def compile_all(wanted: list[int], seconds: float, processes: int) -> None:
    """Every kernel of the cases compiled into the caches on disk by processes side by side, for at most `seconds`."""
    waiting = to_compile(wanted)
    # fla's tuning there means nothing: its results are not kept.
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    running: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < processes:
            what, backend, shard = waiting.pop(0)
            words = [sys.executable, __file__, what, "--backend", backend, "--shard", str(shard)]
            running.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.1)
    took = seconds - (end - time.monotonic())
    print(f"compiling took {took:.0f} s; processes not done: {len(running) + len(waiting)}", flush=True)
    for process in running:
        process.kill()
        process.wait()


def compile_one(what: str, backend: str, shard: int) -> None:
    """Run a case or a layer once; of the configurations that an op of fla tries, every SHARDS-th, and none is timed."""
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def with_fewer(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        original(self, fn, names, configs[shard::SHARDS] or configs[:1], *rest, **more)

    def once(work: Callable[[], Any], **_: Any) -> list[float]:
        work()
        return [1.0, 1.0, 1.0]

    if backend == "fla":
        Autotuner.__init__ = with_fewer
        testing.do_bench = once
    for gradients in (False, True):
        try:
            if what.startswith("E="):
                layer_step(int(what.removeprefix("E=")), backend, gradients)()
            else:
                step(CASES[int(what)], None if backend == "ours" else backend, gradients)()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{what}, {backend}, gradients {gradients}: {error}", file=sys.stderr)


def shorter_tuning() -> None:
    """Triton's tuning, which takes an eighth of a second for each configuration, in a fifth of the time."""
    from triton import testing

    testing.do_bench = functools.partial(testing.do_bench, warmup=5, rep=20)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="number of a case, or a layer: E=8")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--shard", type=int, default=0)
    args = parser.parse_args()
    os.environ["FLA_FLASH_QLA"] = "0"
    compile_one(args.what, args.backend, args.shard)


if __name__ == "__main__":
    main()
