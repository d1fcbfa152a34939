"""Our kernels beside those of other packages on one GPU, through the same public ops.

    python benchmarks/gpu_peers.py --out benchmarks/results/gpu_peers.json
    python benchmarks/gpu_peers.py --only "rule, decay head" --out result.json

Every time includes what our contract costs a peer: rounding, repeated keys, initial and final states. bfloat16, medians
of CUDA events; peaks count what is allocated before. Errors are relative, against the step-by-step definition in
float64 on shorter sequences. "ours" is what a call takes that names no backend. fla runs its own kernels
(FLA_FLASH_QLA=0). Kernels are compiled first (gpu_peer_kernels.py). TileLang takes half a minute for a backward, so
`--compile-only` does that alone, before a run with `--compile-seconds 0`. What fails or takes too long is a row with
its error.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import peers

sys.path.insert(0, str(Path(__file__).parent))
from gpu_peer_cases import CASES, LAYERS, Case, served, step
from gpu_peer_kernels import compile_all, cores, shorter_tuning
from gpu_timing import Rows, median_ms, peak_gib


class TooSlow(Exception):
    """A row took longer than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds: between two steps of Python, not inside one."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"not done after {seconds:.0f} s")

    if seconds < 1:
        # Not even begun: TileLang, stopped while it rewrites a kernel's source, reports an error of its own.
        raise TooSlow("no time was left")
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def timing(case: Case, backend: str | None, gradients: bool, seconds: float) -> dict[str, Any]:
    """Median milliseconds and peak GiB, with what is to know of the call."""
    with at_most(seconds):
        work = step(case, backend, gradients)
        values = {"ms": median_ms(work, repeats=15, warmup=3), "peak_gib": peak_gib(work)}
    return {**facts(case), "backend": backend or "ours", "gradients": gradients, **values}


def facts(case: Case) -> dict[str, Any]:
    """What a row says of its case."""
    sharing = case.subheads if case.op == "subhead_delta_rule" else case.heads // case.key_heads
    return {"case": asdict(case), "dtype": "bfloat16", "sharing": sharing, "states": case.rows * case.heads}


def results(case: Case, tensors: dict[str, Tensor], backend: str | None, gradients: bool) -> dict[str, Tensor]:
    """Outputs, final state and, if asked for, every gradient under a fixed upstream gradient, in float64."""
    leaves = {name: x.clone().requires_grad_(gradients) for name, x in tensors.items()}
    out, final = case.call(leaves, backend)
    named = {"out": out, "state": final}
    if gradients:
        g = torch.Generator("cuda").manual_seed(1)
        upstream = [torch.randn(x.shape, generator=g, device="cuda").bfloat16().to(x.dtype) for x in (out, final)]
        found = torch.autograd.grad([out, final], list(leaves.values()), upstream)
        named |= {f"d_{name}": x for name, x in zip(leaves, found, strict=True)}
    return {name: x.detach().double() for name, x in named.items()}


@functools.lru_cache(maxsize=1)
def right(case: Case, strong: bool, gradients: bool) -> dict[str, Tensor]:
    """`results` of the definition: the loop over tokens where it is short and its states few, else in chunks."""
    exact = {name: x.double() for name, x in case.inputs(strong).items()}
    definition = "reference" if case.length < 1000 and case.heads <= 16 else "chunked"
    return results(case, exact, definition, gradients)


def accuracy(case: Case, backend: str | None, strong: bool, gradients: bool, seconds: float) -> dict[str, Any]:
    """Relative errors of outputs, final state and gradients against the definition in float64; `worst` of them."""
    with at_most(seconds):
        wanted = right(case, strong, gradients)
        found = results(case, case.inputs(strong), backend, gradients)
        errors = {name: float((found[name] - x).norm() / x.norm()) for name, x in wanted.items()}
    # max() may pass over a NaN.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    row = {**facts(case), "backend": backend or "ours", "gradients": gradients, **errors}
    return {**row, "worst": errors[worst], "worst_of": worst}


def measure(rows: Rows, cases: list[Case], deadline: float) -> None:
    """Times of the cases, errors of every kind, then attention and whole layers beside."""

    def left() -> float:
        return min(20.0, deadline - time.monotonic())

    for case in cases:
        for backend in (None, *served(case)):
            for gradients in (False, True):
                what = "forward and backward" if gradients else "forward"
                work = functools.partial(timing, case, backend, gradients, left())
                rows.measure(f"{case.name}: {what}, {backend or 'ours'}", work)
            torch.cuda.empty_cache()
    seen = set()
    for case in cases:
        short = (1, 4096) if case.rows == 1 else (2, 449)
        small = Case(**{**asdict(case), "rows": short[0], "length": short[1]})
        for strong, gradients in ((False, False), (False, True), (True, False), (True, True)):
            if small in seen or (strong and case.decay == "none"):
                continue
            for backend in (None, *served(case)):
                which = f"{'strong' if strong else 'mild'} decays, {'with' if gradients else 'without'} gradients"
                work = functools.partial(accuracy, small, backend, strong, gradients, left())
                rows.measure(f"errors of {small.name}: {which}, {backend or 'ours'}", work)
        seen.add(small)
        torch.cuda.empty_cache()
    beside(rows, left)


def beside(rows: Rows, left: Callable[[], float], factors: tuple[int, ...] = (1, 8)) -> None:
    """Softmax attention of the same width, and whole layers of d 1024 with 8 heads of 128 at 8 x 4096.

    Of peers' layers only those of `LAYERS`; what they need beyond is among the cases.
    """
    import gpu_delta

    for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.CUDNN_ATTENTION):

        def attention(backend: Any = backend) -> dict[str, Any]:
            q, k, v = (torch.randn(8, 8, 4096, 128, device="cuda").bfloat16() for _ in range(3))

            def forward() -> Tensor:
                with torch.nn.attention.sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            with at_most(left()):
                return gpu_delta.timed(forward, [q, k, v])

        rows.measure(f"softmax attention 8x4096 8 x 128, {backend.name}", attention)

    def layer() -> dict[str, Any]:
        mixer = mixer_config({"type": "attention", "num_heads": 8, "head_dim": 128}).build(1024).cuda().bfloat16()
        x = torch.randn(8, 4096, 1024, device="cuda").bfloat16()
        position = torch.zeros(8, dtype=torch.long, device="cuda")
        forward = lambda: mixer(x, None, mask=None, position=position)[0]  # noqa: E731
        return gpu_delta.timed(forward, [x, *mixer.parameters()])

    rows.measure("layer, softmax attention", layer)
    torch.cuda.empty_cache()
    for factor in factors:
        if left() > 5:
            gpu_delta.layers(rows, (8, 4096), [factor], others=LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=115.0, help="end after so many [%(default)s]")
    parser.add_argument("--compile-seconds", type=float, default=55.0, help="of them for compiling [%(default)s]")
    parser.add_argument("--processes", type=int, default=cores(), help="that compile [%(default)s]")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names contain one of these [all]")
    parser.add_argument("--compile-only", action="store_true", help="fill the caches on disk, measure nothing")
    args = parser.parse_args()
    os.environ["FLA_FLASH_QLA"] = "0"
    deadline = time.monotonic() + args.seconds
    wanted = [n for n, case in enumerate(CASES) if any(part in case.name for part in args.only)]
    if args.compile_only or args.compile_seconds > 0:
        compile_all(wanted, args.seconds if args.compile_only else args.compile_seconds, args.processes)
    if args.compile_only:
        return
    shorter_tuning()
    rows = Rows("gpu_peers", args.out)
    for name in peers.PEERS:
        rows.add(f"backend {name}", reason=peers.why_not_here(name))
    measure(rows, [CASES[n] for n in wanted], deadline)


if __name__ == "__main__":
    main()
