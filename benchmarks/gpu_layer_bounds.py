"""What a layer with subheads has to move and to multiply, kernel by kernel, beside the time that each kernel takes.

    python benchmarks/gpu_layer_bounds.py --out benchmarks/results/gpu_layer_bounds.json
    python benchmarks/gpu_layer_bounds.py --counts
    python benchmarks/gpu_layer_bounds.py --recount benchmarks/results/gpu_layer_bounds.json

One Gated DeltaNet layer of 8 heads of 128 with E subheads each, forward and backward, 8 x 4,096 tokens, bfloat16.
Bytes and products are counted from the shapes: every tensor that a kernel must read or write counts once, what subheads
share counts once for all of them, and whatever stays in registers, shared memory or the cache counts nothing. Not
counted: weights and numbers of a head rather than of a token, and the kernels of the gates ("everything else").
`bound_ms` is the longer of both times, at the copy rate and at the rate of a large matrix product of the same run; `ms`
is what the profiler saw. A kernel beyond its bound is held up by something else: instructions (hopper_instructions.py),
waiting, or a launch that does not fill the GPU.

`--counts` prints the counts alone, without a GPU; layer_designs.py counts other ways to compute the same layer.
`--recount` is for a change of the counts: it writes bounds and shares of a record anew and leaves its times alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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
SINGLE = 4
"""Bytes of a float32 number."""
CUBLAS = ("projections", "projections of the gates", "gradients of heads and weights")
"""Parts whose launches cannot be told apart by name: a record has one row for all."""
JOINT = f"{CUBLAS[0]} and {CUBLAS[2]}"
"""The name of that row."""


@dataclass(frozen=True)
class Part:
    """A group of launches: the beginnings of their kernels' names, bytes moved and FLOPs of products."""

    name: str
    kernels: tuple[str, ...]
    bytes: float
    flops: float


@dataclass(frozen=True)
class Units:
    """What parts are counted in: bytes, unless it says otherwise."""

    tile: float
    """64 tokens of one subhead: queries, keys, corrections or their gradients."""
    square: float
    """The inverse of a chunk of 64 tokens."""
    cells: float
    """A state, or its gradient."""
    shared: float
    """64 tokens of a head that all its subheads read or write together, divided by their number."""
    line: float
    """A float32 number for each of 64 tokens: a decay or a beta."""
    chunks: int
    """Chunks of 64 tokens of all subheads: that many times all of the above are moved."""
    heads: float
    """A tensor of all heads and tokens, such as the projected queries."""
    wide: float
    """A tensor of all subheads and tokens, such as the expanded queries."""
    norms: float
    """A float32 number for each token and subhead."""
    onto_scores: float
    """FLOPs of a product of 64 x 64 numbers over 128 channels, or of as many multiplications."""
    onto_state: float
    """FLOPs of a product of 64 tokens with a state, or with a weight of 128 x 128."""
    expansion: float
    """FLOPs of expanding all queries, or all keys."""
    projection: float
    """FLOPs of a product of all tokens with a weight of the layer's width."""


def units(subheads: int) -> Units:
    tile = CHUNK * WIDTH * NARROW
    chunks = TOKENS // CHUNK * HEADS * subheads
    onto_state = 2 * CHUNK * WIDTH * WIDTH
    return Units(
        tile=tile,
        square=CHUNK * CHUNK * NARROW,
        cells=WIDTH * WIDTH * NARROW,
        shared=tile / subheads,
        line=CHUNK * SINGLE,
        chunks=chunks,
        heads=TOKENS * HIDDEN * NARROW,
        wide=chunks * tile,
        norms=TOKENS * HEADS * subheads * SINGLE,
        onto_scores=2 * CHUNK * CHUNK * WIDTH,
        onto_state=onto_state,
        expansion=chunks * onto_state,
        projection=2 * TOKENS * HIDDEN * HIDDEN,
    )


def parts(subheads: int) -> list[Part]:
    """All parts of a layer, forward and backward."""
    u = units(subheads)
    # Decays and betas of all subheads are one product of the layer's input.
    gates = 2 * HEADS * subheads / HIDDEN
    made = Part("expansion, convolution, SiLU, norm", ("forward_kernel",), 4 * (u.heads + u.wide), 4 * u.expansion)
    return [
        # q, k, v, the gate and the output; each forward, its input's and its weight's gradient. Four of the gradients
        # of the input go to one buffer: three of them, and that of the gates, read it as well.
        Part(CUBLAS[0], (), 33 * u.heads, 15 * u.projection),
        Part(CUBLAS[1], (), (4 + 3 * gates) * u.heads, 3 * gates * u.projection),
        # Queries and keys, forward and again in the backward, which needs the norms too.
        replace(made, bytes=made.bytes + 2 * u.norms),
        Part("gradients of those", ("backward_kernel",), 2 * (u.heads + 2 * u.wide + u.norms), 2 * u.expansion),
        Part(CUBLAS[2], (), 4 * (u.heads + u.wide), 4 * u.expansion),
        *recurrence(u),
        # Values, forward, again and backward.
        Part("convolution of values", ("_forward_kernel", "_backward_kernel", "column_sums"), 7 * u.heads, 0),
        Part("norm and gate", ("gated_norm",), 9 * u.heads, 0),
        # SiLU of projected queries and keys, forward, again and backward.
        Part("elementwise", ("void at::native",), 2 * 7 * u.heads, 0),
    ]


def recurrence(u: Units) -> list[Part]:
    """The parts that go from chunk to chunk, or take every chunk by itself."""
    tile, square, cells, shared, line = u.tile, u.square, u.cells, u.shared, u.line
    scores, state = u.onto_scores, u.onto_state
    # The last state of every subhead, in float32, spread over its chunks.
    last = WIDTH * WIDTH * SINGLE / (LENGTH // CHUNK)
    # The kernel also multiplies states with their gradients, for a sum that needs no product.
    keys = (6 * tile + 2 * cells + shared + 4 * line, 6 * scores + 3 * state)
    counted: dict[tuple[str, ...], tuple[float, float]] = {
        ("inverse", "invert_kernel"): (tile + square + 3 * line, 10 * 2 * 16 * 16 * WIDTH),
        ("walk, forward", "walk_kernel"): (3 * tile + square + shared + last + 2 * line, 3 * scores + 3 * state),
        ("sum over subheads", "part_sums_kernel"): (tile + shared, 0),
        ("walk that keeps states",): (2 * tile + square + shared + cells + 2 * line, scores + 2 * state),
        ("walk back", "walk_back_kernel"): (3 * tile + square + shared + cells + 2 * line, 3 * scores + 3 * state),
        ("gradients of values", "values_kernel"): (tile + 2 * shared + 2 * line, 0),
        ("gradients of queries and keys", "keys_kernel"): keys,
    }
    return [
        Part(name, tuple(kernels), u.chunks * moved, u.chunks * flops)
        for (name, *kernels), (moved, flops) in counted.items()
    ]


def bound_ms(counted: list[Part], rates: dict[str, float]) -> float:
    """The sum of the parts' bounds, at the rates of a record."""
    return sum(
        max(1e-9 * part.bytes / rates["copy_tb_per_second"], 1e-9 * part.flops / rates["product_tflops"])
        for part in counted
    )


def rows_of(subheads: int, found: dict[str, float], rates: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The rows of a record by their names: what was counted beside the milliseconds `found`."""
    groups = {part.name: [part] for part in parts(subheads)}
    groups[JOINT] = [part for name in CUBLAS for part in groups.pop(name)]
    rows: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        bound, ms = bound_ms(group, rates), found[name]
        rows[name] = {"ms": ms, "bound_ms": bound, "share": bound / ms if ms else None}
        rows[name] |= {"gigabytes": sum(x.bytes for x in group) / 1e9, "teraflops": sum(x.flops for x in group) / 1e12}
    bound = sum(row["bound_ms"] for row in rows.values())
    rows["everything else"] = {"ms": found["everything else"]}
    total = sum(row["ms"] for row in rows.values())
    return rows | {"all kernels": {"ms": total, "bound_ms": bound, "share": bound / total}}


def recount(record: Path) -> None:
    """Write what is counted in a record anew: bytes, products, bounds and shares. Times and rates stay."""
    told = json.loads(record.read_text(encoding="utf-8"))
    rates, layer_row, *measured_rows = told["rows"]
    found = {row["name"]: row["ms"] for row in measured_rows}
    subheads = int(re.fullmatch(r"layer E (\d+)", layer_row["name"])[1])  # type: ignore[index]
    rows = [{"name": name, **values} for name, values in rows_of(subheads, found, rates).items()]
    told["rows"] = [rates, layer_row, *rows]
    record.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


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
    found[JOINT] = sum(products.values())
    found["everything else"] = sum(times.values()) - sum(products.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subheads", type=int, default=8, help="E, at least 2 [%(default)s]")
    parser.add_argument("--counts", action="store_true", help="print the counts alone, without a GPU")
    parser.add_argument(
        "--designs", type=Path, metavar="RECORD", help="print other designs' bounds at a record's rates"
    )
    parser.add_argument("--recount", type=Path, metavar="RECORD", help="count a record anew; its times stay")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.subheads < 2:
        parser.error("--subheads must be at least 2: a layer without subheads runs other kernels")
    if args.counts:
        for part in parts(args.subheads):
            print(f"{part.name}: {part.bytes / 1e9:.2f} GB, {part.flops / 1e12:.3f} TFLOP")
    if args.recount:
        recount(args.recount)
    if args.counts or args.recount:
        return
    rows = Rows("gpu_layer_bounds", args.out)
    rates = {"copy_tb_per_second": copy_rate() / 1e12, "product_tflops": product_rate() / 1e12}
    rows.add("rates", **rates)
    both, _ = layer(args.subheads)
    rows.add(f"layer E {args.subheads}", ms=median_ms(both, repeats=30, warmup=5))
    for name, values in rows_of(args.subheads, measured(args.subheads), rates).items():
        rows.add(name, **values)


if __name__ == "__main__":
    main()
