"""What a layer with subheads has to move and to multiply, kernel by kernel, beside the time that each kernel takes.

    python benchmarks/gpu_layer_bounds.py --out benchmarks/results/gpu_layer_bounds.json

One Gated DeltaNet layer of 8 heads of 128 with E subheads each, forward and backward, 8 x 4,096 tokens, bfloat16.
Bytes and products are counted from the shapes: every tensor that a kernel must read or write counts once, what subheads
share counts once for all of them, and whatever stays in registers, shared memory or the cache counts nothing.
`bound_ms` is the longer of both times, at the copy rate and at the rate of a large matrix product of the same run; `ms`
is what the profiler saw. A kernel beyond its bound is held up by something else: instructions, waiting, or a launch
that does not fill the GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, copy_rate, median_ms

ROWS, LENGTH, WIDTH, HEADS, CHUNK = 8, 4096, 128, 8, 64
HIDDEN = HEADS * WIDTH
TOKENS = ROWS * LENGTH
NARROW = 2
"""Bytes of a bfloat16 number."""


@dataclass(frozen=True)
class Part:
    """A group of launches: the beginnings of their kernels' names, bytes moved and FLOPs of products."""

    name: str
    kernels: tuple[str, ...]
    bytes: float
    flops: float


def parts(subheads: int) -> list[Part]:
    """All parts of a layer, forward and backward."""
    # Per chunk and state: rows of a head, the scores of a chunk, a state; what all subheads share, divided by them.
    tile, square, cells = CHUNK * WIDTH * NARROW, CHUNK * CHUNK * NARROW, WIDTH * WIDTH * NARROW
    shared = tile / subheads
    onto_scores, onto_state = 2 * CHUNK * CHUNK * WIDTH, 2 * CHUNK * WIDTH * WIDTH
    chunks = TOKENS // CHUNK * HEADS * subheads

    def walk(name: str, kernels: tuple[str, ...], moved: float, products: float) -> Part:
        return Part(name, kernels, chunks * moved, chunks * products)

    # Per token: a tensor of all heads, the same for all subheads.
    heads, wide = TOKENS * HIDDEN * NARROW, TOKENS * HIDDEN * subheads * NARROW
    expansion = 2 * TOKENS * HEADS * WIDTH * subheads * WIDTH
    projection = 2 * TOKENS * HIDDEN * HIDDEN
    return [
        # q, k, v, the gate and the output; each forward, its input's and its weight's gradient.
        Part("projections", (), 0, 15 * projection),
        # Queries and keys, forward and again in the backward.
        Part("expansion, convolution, SiLU, norm", ("forward_kernel",), 4 * (heads + wide), 4 * expansion),
        Part("gradients of those", ("backward_kernel",), 2 * (heads + 2 * wide), 2 * expansion),
        Part("gradients of heads and weights", (), 4 * (heads + wide), 4 * expansion),
        walk("inverse", ("invert_kernel",), tile + square, 10 * 2 * 16 * 16 * WIDTH),
        walk("walk, forward", ("walk_kernel",), 3 * tile + square + shared, 3 * onto_scores + 3 * onto_state),
        walk("sum over subheads", ("part_sums_kernel",), tile + shared, 0),
        walk("walk that keeps states", (), 2 * tile + square + shared + cells, onto_scores + 2 * onto_state),
        walk("walk back", ("walk_back_kernel",), 3 * tile + square + shared + cells, 3 * onto_scores + 3 * onto_state),
        walk("gradients of values", ("values_kernel",), tile + 2 * shared, 0),
        walk(
            "gradients of queries and keys",
            ("keys_kernel",),
            6 * tile + 2 * cells + shared,
            8 * onto_scores + 4 * onto_state,
        ),
        # Values, forward, again and backward.
        Part("convolution of values", ("_forward_kernel", "_backward_kernel", "column_sums"), 7 * heads, 0),
        Part("norm and gate", ("gated_norm",), 9 * heads, 0),
        # SiLU of projected queries and keys, forward, again and backward.
        Part("elementwise", ("void at::native",), 2 * 7 * heads, 0),
    ]


def profiled(work: Callable[[], None], times: int = 4) -> dict[str, tuple[float, float]]:
    """Milliseconds and launches of one call, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(5):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    return {e.key: (e.self_device_time_total / 1e3 / times, e.count / times) for e in events}


def layer(subheads: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A layer forward and backward, and forward alone."""
    from longrecall.layers.mixers.registry import mixer_config

    description = {"type": "gated_delta_net", "num_heads": HEADS, "key_dim": WIDTH, "value_dim": WIDTH, "conv_width": 4}
    description |= {"output_gate": True, "expansion": {"kind": "headwise", "factor": subheads}}
    with torch.device("cuda"):
        made = mixer_config(description).build(HIDDEN).to(torch.bfloat16)
        x = torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        position, weight = torch.zeros(ROWS, dtype=torch.long), torch.randn_like(x)
    leaves = [x, *made.parameters()]

    def both() -> None:
        y, _ = made(x, None, mask=None, position=position)
        torch.autograd.grad(y, leaves, weight)

    def forward() -> None:
        with torch.no_grad():
            made(x, None, mask=None, position=position)

    return both, forward


def product_rate() -> float:
    """FLOPs a second of a large product in bfloat16."""
    a = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(HIDDEN, 4 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    return 2 * TOKENS * HIDDEN * 4 * HIDDEN / (median_ms(lambda: a @ b, repeats=30) / 1e3)


def measured(subheads: int) -> dict[str, float]:
    """Milliseconds of every part; launches of cuBLAS are told apart by what they multiply."""
    both, forward = layer(subheads)
    times = {name: ms for name, (ms, _) in profiled(both).items()}
    once = {name: ms for name, (ms, _) in profiled(forward).items()}
    found: dict[str, float] = {}
    for part in parts(subheads):
        own = [name for name in times if part.kernels and name.startswith(part.kernels)]
        found[part.name] = sum(times.pop(name) for name in own)
    walks = found["walk, forward"]
    found["walk, forward"] = sum(ms for name, ms in once.items() if name.startswith("walk_kernel"))
    found["walk that keeps states"] = walks - found["walk, forward"]
    # The large tiles are the projections'.
    products = {name: ms for name, ms in times.items() if "nvjet" in name or "cublas" in name or "gemm" in name}
    found["projections and gradients of heads and weights"] = sum(products.values())
    found["everything else"] = sum(times.values()) - sum(products.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subheads", type=int, default=8, help="E [%(default)s]")
    parser.add_argument("--counts", action="store_true", help="print the counts alone, without a GPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counted = parts(args.subheads)
    if args.counts:
        for part in counted:
            print(f"{part.name}: {part.bytes / 1e9:.2f} GB, {part.flops / 1e12:.3f} TFLOP")
        return
    rows = Rows("gpu_layer_bounds", args.out)
    copied, multiplied = copy_rate(), product_rate()
    rows.add("rates", copy_tb_per_second=copied / 1e12, product_tflops=multiplied / 1e12)
    both, _ = layer(args.subheads)
    rows.add(f"layer E {args.subheads}", ms=median_ms(both, repeats=30, warmup=5))
    found = measured(args.subheads)
    bounds: dict[str, tuple[float, float, float]] = {}
    for part in counted:
        bound = 1e3 * max(part.bytes / copied, part.flops / multiplied)
        bounds[part.name] = (bound, part.bytes / 1e9, part.flops / 1e12)
    joint = ("projections", "gradients of heads and weights")
    bounds[f"{joint[0]} and {joint[1]}"] = tuple(map(sum, zip(*(bounds.pop(name) for name in joint), strict=True)))  # type: ignore[assignment]
    for name, (bound, gigabytes, teraflops) in bounds.items():
        row: dict[str, Any] = {
            "ms": found[name],
            "bound_ms": bound,
            "share": bound / found[name] if found[name] else None,
        }
        rows.add(name, **row, gigabytes=gigabytes, teraflops=teraflops)
    total = sum(found.values())
    bound = sum(values[0] for values in bounds.values())
    rows.add("everything else", ms=found["everything else"])
    rows.add("all kernels", ms=total, bound_ms=bound, share=bound / total)


if __name__ == "__main__":
    main()
