"""Our chunked ops beside transformers' torch fallbacks on the CPU: time, agreement, memory.

    python benchmarks/cpu_ops.py --threads 2 --repeats 15 --out benchmarks/results/cpu_ops.json

float32, B=1, T=2048. Ours and the peer's run in turn (A B A B), so that a noisy machine hurts both, and the ratio
is the median of the ratios of neighbours. Both compute the gradient of every input; results are compared first.
The growth of the peak memory of a forward is taken in a fresh process for every length.

`product_share` is the rate of the gated delta rule, forward and backward, beside that of a float32 product of two
2048 x 2048 matrices, taken in turn. Counted are the matrix products of the chunked form, C = 64, once each: for every
chunk and head, in multiplications and additions, forward 2CKV three times (2C rows read the state, C write it) and 4CCK
+ 4CCV (scores; the inverse and the scores times the corrections); backward twice as much. What is not counted: the
inverse itself, and everything done element by element. Products of which a mask keeps the lower half count whole in
`share`, and half in `share_without_masked`.

`bfloat16` compares our op on bfloat16 inputs with float32 and with bfloat16 products (see ops/products.py), in turn;
null where the CPU has no instructions for them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# See cpu_timing.py: a spinning thread holds up the one it waits for on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from cpu_timing import OtherPrograms, cpu_parser, disagreement, peak_rss, ratio_of, recorded
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops import gated_delta_rule, gated_linear_attention, products

LENGTH = 2048
CHUNK = 64
PRODUCT_SIZE = 2048
MEMORY_LENGTHS = (2048, 4096, 8192)
# The same float32 sums in another order; decayed scores and states of order one.
AGREEMENT = 1e-3
# A dozen roundings to eight bits, 2**-9 each.
BFLOAT16_AGREEMENT = 12 * 2**-9


@dataclass(frozen=True)
class Case:
    """One comparison: `inputs(T)` makes the leaves, `ours` and `peer` map them to outputs ``[B, T, H, V]``."""

    name: str
    peer_name: str
    inputs: Callable[[int], list[Tensor]]
    ours: Callable[..., Tensor]
    peer: Callable[..., Tensor]


def delta_inputs(length: int) -> list[Tensor]:
    """q, normalised k, v ``[1, T, 8, 128]``, log decay and beta ``[1, T, 8]``."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 8, 128, generator=g) for _ in range(3))
    decay = F.logsigmoid(torch.randn(1, length, 8, generator=g) + 3)
    beta = torch.rand(1, length, 8, generator=g)
    return [q, F.normalize(k, dim=-1), v, decay, beta]


def our_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule(q, k, v, decay, beta, backend="chunked")[0]


def peer_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, decay, beta)[0]


def scan_inputs(groups: int) -> Callable[[int], list[Tensor]]:
    """x ``[1, T, 16, 64]``, time step ``[1, T, 16]``, A ``[16]``, B and C ``[1, T, groups, 128]``."""

    def make(length: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(1, length, 16, 64, generator=g)
        step = F.softplus(torch.randn(1, length, 16, generator=g) - 4)
        a = -torch.linspace(1, 16, 16)
        b, c = (torch.randn(1, length, groups, 128, generator=g) for _ in range(2))
        return [x, step, a, b, c]

    return make


def our_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return gated_linear_attention(c, b, x * step[..., None], step * a, scale=1.0, backend="chunked")[0]


def peer_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    return mamba2_chunk_scan(x, step, a, b, c, chunk_size=Mamba2Config().chunk_size)


CASES = [
    Case("gated delta rule", "qwen3_next torch_chunk_gated_delta_rule", delta_inputs, our_delta, peer_delta),
    Case("Mamba-2 scan, 1 group", "mamba2_chunk_scan, chunk 256", scan_inputs(1), our_scan, peer_scan),
    Case("Mamba-2 scan, 8 groups", "mamba2_chunk_scan, chunk 256", scan_inputs(8), our_scan, peer_scan),
]


def forward(function: Callable[..., Tensor], inputs: list[Tensor], _: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [function(*inputs)]


def forward_backward(function: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def measure(case: Case, repeats: int) -> dict[str, object]:
    """Seconds of ours and of the peer in turn, and the ratios peer / ours of neighbours."""
    inputs = case.inputs(LENGTH)
    weight = torch.randn(case.ours(*inputs).shape, generator=torch.Generator().manual_seed(1))
    error = disagreement(*(forward_backward(f, inputs, weight) for f in (case.ours, case.peer)))
    if error > AGREEMENT:
        raise RuntimeError(f"{case.name}: ours and the peer differ by {error:.1e}; a timing would mean nothing")
    row: dict[str, object] = {"op": case.name, "peer": case.peer_name, "largest_relative_difference": error}
    for label, run in (("forward", forward), ("forward_backward", forward_backward)):
        ours, peer = in_turn(repeats, *(partial(run, f, inputs, weight) for f in (case.ours, case.peer)))
        row[label] = {"ours_ms": median_ms(ours), "peer_ms": median_ms(peer)} | ratio_of(peer, ours)
    return row


def in_turn(repeats: int, *actions: Callable[[], object]) -> list[list[float]]:
    """Seconds of every action, A B A B; the first round is not kept."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats + 1):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [taken[1:] for taken in times]


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def delta_operations(length: int, heads: int, width: int, masked: float) -> float:
    """Multiplications and additions of a forward and backward; K = V = `width`, masked products count `masked`."""
    dense = 6 * CHUNK * width * width
    triangular = 8 * CHUNK * CHUNK * width
    return 3 * (dense + masked * triangular) * heads * length / CHUNK


def measure_share(repeats: int) -> dict[str, float]:
    """The gated delta rule's rate, forward and backward, as a share of a float32 product's."""
    inputs = delta_inputs(LENGTH)
    weight = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1))
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, generator=torch.Generator().manual_seed(n)) for n in (2, 3))
    op, product = in_turn(repeats, partial(forward_backward, our_delta, inputs, weight), partial(torch.mm, a, b))
    shape = (LENGTH, *inputs[2].shape[2:])
    whole, half = (delta_operations(*shape, masked) for masked in (1.0, 0.5))
    # Operations a second of ours over those of the product, pair by pair.
    shares = [whole / mine / (2 * PRODUCT_SIZE**3 / theirs) for mine, theirs in zip(op, product, strict=True)]
    share = statistics.median(shares)
    return {
        "operations": whole,
        "product_gflops": 2 * PRODUCT_SIZE**3 / statistics.median(product) / 1e9,
        "share": share,
        "share_low": min(shares),
        "share_high": max(shares),
        "share_without_masked": share * half / whole,
    }


def measure_bfloat16(case: Case, repeats: int) -> dict[str, object] | None:
    """The op on bfloat16 inputs (gates stay float32), with float32 and with bfloat16 products; None if it has none."""
    if not products.CPU_MULTIPLIES_BFLOAT16 or case.name == "gated delta rule":
        return None
    inputs = [x.bfloat16() if x.dim() == 4 else x for x in case.inputs(LENGTH)]
    weight = torch.randn(case.ours(*inputs).shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    def with_products(low: bool, run: Callable[..., list[Tensor]]) -> list[Tensor]:
        products.CPU_MULTIPLIES_BFLOAT16 = low
        try:
            return run(case.ours, inputs, weight)
        finally:
            products.CPU_MULTIPLIES_BFLOAT16 = True

    error = disagreement(*([x.float() for x in with_products(low, forward_backward)] for low in (True, False)))
    if error > BFLOAT16_AGREEMENT:
        raise RuntimeError(f"{case.name}: bfloat16 and float32 products differ by {error:.1e}")
    row: dict[str, object] = {"largest_relative_difference": error}
    for label, run in (("forward", forward), ("forward_backward", forward_backward)):
        exact, low = in_turn(repeats, partial(with_products, False, run), partial(with_products, True, run))
        row[label] = {"float32_ms": median_ms(exact), "bfloat16_ms": median_ms(low)} | ratio_of(exact, low)
    return row


def memory_growth(case: Case, length: int) -> float:
    """MiB by which one forward without gradients raises the peak of this process, its inputs not counted."""
    with torch.no_grad():
        case.ours(*case.inputs(64))
        inputs = case.inputs(length)
        # Makes the peak the present: what the making of the inputs had left behind does not hide the forward.
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_rss()
        case.ours(*inputs)
    return peak_rss() - before


def measure_memory(index: int, threads: int) -> dict[str, float]:
    """Growth in MiB by length, each in a process of its own."""
    found = {}
    for length in MEMORY_LENGTHS:
        command = [sys.executable, __file__, "--threads", str(threads), "--memory", str(index), str(length)]
        # The child finds the package where this process did, installed or not; and a fixed threshold makes glibc give
        # freed tensors back at once, so that the peak is what the op holds and not what the allocator hoards.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_MMAP_THRESHOLD_": "65536"}
        found[str(length)] = float(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    return found


def print_table(rows: list[dict]) -> None:
    print(f"{'op':24}{'pass':18}{'ours ms':>9}{'peer ms':>9}{'ratio':>8}   range")
    for row in rows:
        for label in ("forward", "forward_backward"):
            x = row[label]
            times = f"{x['ours_ms']:9.1f}{x['peer_ms']:9.1f}{x['ratio']:7.2f}x"
            print(f"{row['op']:24}{label:18}{times}   {x['ratio_low']:.2f}-{x['ratio_high']:.2f}")
    for row in rows:
        growth = ", ".join(f"T={length} {mib:.0f} MiB" for length, mib in row.get("forward_memory_mib", {}).items())
        if growth:
            print(f"{row['op']:24}forward memory    {growth}")
    for row in rows:
        for label in ("forward", "forward_backward") if row.get("bfloat16") else ():
            x = row["bfloat16"][label]
            times = f"{x['bfloat16_ms']:9.1f}{x['float32_ms']:9.1f}{x['ratio']:7.2f}x"
            print(f"{row['op']:24}{label + ', bf16':22}{times}   {x['ratio_low']:.2f}-{x['ratio_high']:.2f}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = cpu_parser(__doc__, threads=2)
    parser.add_argument("--repeats", type=int, default=15, help="pairs per op and pass")
    parser.add_argument("--memory", type=int, nargs=2, metavar=("CASE", "T"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.memory:
        case, length = options.memory
        print(memory_growth(CASES[case], length))
        return {}
    others = OtherPrograms()
    rows = []
    for index, case in enumerate(CASES):
        memory = {"forward_memory_mib": measure_memory(index, options.threads)}
        rows.append(measure(case, options.repeats) | {"bfloat16": measure_bfloat16(case, options.repeats)} | memory)
    share = measure_share(options.repeats)
    print_table(rows)
    print(
        f"gated delta rule, forward and backward: {share['share']:.0%} of {share['product_gflops']:.0f} GFLOP/s "
        f"({share['share_without_masked']:.0%} without what masks discard)"
    )
    settings = {"batch": 1, "length": LENGTH, "repeats": options.repeats}
    return recorded(options, settings, rows, cores_busy_elsewhere=others.cores(), product_share=share)


if __name__ == "__main__":
    main()
