"""Recurrences and whole layers on one GPU: forward, forward+backward and peak memory, ours beside peers.

    python benchmarks/gpu_layers.py --only linear layers --out benchmarks/results/gpu_layers.json

bfloat16, B 8, T 4096, medians of CUDA events. "TFLOP/s" counts the products that the chunked form needs at chunks of
64. Peers (flash-linear-attention, FlashQLA) are timed where they can be imported, and a row says why where they cannot;
`--slow-peers` adds those that tune themselves for minutes. fla runs its own kernels (FLA_FLASH_QLA=0). "first call"
rows are the seconds of a layer's first step in a fresh process with an empty cache, compiling included.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import gated_linear_attention, merged_linear_attention, peers, selective_scan

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms, peak_gib

CHUNK = 64


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers that want a gradient."""
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def gate(*shape: int, divisor: float) -> Tensor:
    """Log decays as models have them: logsigmoid of a normal number over `divisor`."""
    return (F.logsigmoid(torch.randn(*shape, device="cuda")) / divisor).requires_grad_()


def timed(op: Callable[[], Tensor], leaves: list[Tensor], flops: float | None = None) -> dict[str, Any]:
    """Milliseconds forward without gradients and forward+backward, peak GiB of the latter."""

    def forward() -> None:
        with torch.no_grad():
            op()

    weight = torch.randn_like(op().detach())

    def both() -> None:
        torch.autograd.grad(op(), leaves, weight)

    values: dict[str, Any] = {"forward_ms": median_ms(forward), "both_ms": median_ms(both), "peak_gib": peak_gib(both)}
    if flops is not None:
        # The backward of a product is two products of its size.
        values["forward_tflops"] = flops / values["forward_ms"] / 1e9
        values["both_tflops"] = 3 * flops / values["both_ms"] / 1e9
    return values


def products(tokens: int, keys: int, values: int, heads: int, scores: int) -> float:
    """Operations of `heads` states ``[keys, values]`` read and written, and of `scores` key heads' C x C scores."""
    return 2.0 * tokens * (2 * heads * keys * values + CHUNK * (scores * keys + heads * values))


def linear_ops(rows: Rows, args: argparse.Namespace) -> None:
    """GLA 1.3B's heads unmerged and merged, Mamba-2's with its state grown four times."""
    B, T = args.batch, args.length

    def gla(backend: str) -> dict[str, Any]:
        q, k, v, g = random(B, T, 4, 256), random(B, T, 4, 256), random(B, T, 4, 512), gate(B, T, 4, 256, divisor=16)
        op = lambda: gated_linear_attention(q, k, v, g, backend=backend)[0]  # noqa: E731
        return timed(op, [q, k, v, g], products(B * T, 256, 512, 4, 4))

    def merged(backend: str) -> dict[str, Any]:
        q, k, v, g = random(B, T, 4, 256), random(B, T, 4, 256), random(B, T, 4, 512), gate(B, T, 4, 256, divisor=16)
        mixing = random(4, 4, dtype=torch.float32)
        op = lambda: merged_linear_attention(q, k, v, g, mixing, backend=backend)[0]  # noqa: E731
        flops = 2.0 * B * T * (2 * 1024 * 2048 + CHUNK * (4 * 256 + 4 * 512))
        return timed(op, [q, k, v, g, mixing], flops)

    def mamba(width: int, backend: str) -> dict[str, Any]:
        q, k, v, g = random(B, T, 1, width), random(B, T, 1, width), random(B, T, 64, 64), gate(B, T, 64, divisor=1)
        op = lambda: gated_linear_attention(q, k, v, g, scale=1.0, backend=backend)[0]  # noqa: E731
        return timed(op, [q, k, v, g], products(B * T, width, 64, 64, 1))

    for backend in args.backends:
        rows.measure(f"op gla 4 x (256, 512), {backend}", lambda backend=backend: gla(backend))
        rows.measure(f"op merged gla (1024, 2048), {backend}", lambda backend=backend: merged(backend))
        for width in (128, 512):
            name = f"op mamba2 64 x ({width}, 64), {backend}"
            rows.measure(name, lambda width=width, backend=backend: mamba(width, backend))


def linear_peers(rows: Rows, args: argparse.Namespace) -> None:
    """flash-linear-attention's kernels at the same sizes; its merged head has no mixing matrix."""
    B, T = args.batch, args.length

    def gla(heads: int, keys: int, values: int) -> dict[str, Any]:
        chunk_gla = importlib.import_module("fla.ops.gla").chunk_gla
        q, k, v = random(B, T, heads, keys), random(B, T, heads, keys), random(B, T, heads, values)
        g = gate(B, T, heads, keys, divisor=16)
        op = lambda: chunk_gla(q, k, v, g)[0]  # noqa: E731
        return timed(op, [q, k, v, g], products(B * T, keys, values, heads, heads))

    def mamba(width: int) -> dict[str, Any]:
        # Its heads share no keys: q and k are repeated for each, inside the timed region as a layer would have to.
        chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
        q, k, v, g = random(B, T, 1, width), random(B, T, 1, width), random(B, T, 64, 64), gate(B, T, 64, divisor=1)

        def op() -> Tensor:
            out: Tensor = chunk_simple_gla(q.expand(-1, -1, 64, -1), k.expand(-1, -1, 64, -1), v, g, scale=1.0)[0]
            return out

        return timed(op, [q, k, v, g], products(B * T, width, 64, 64, 1))

    rows.measure("op gla 4 x (256, 512), fla", lambda: gla(4, 256, 512))
    rows.measure("op mamba2 64 x (128, 64), fla simple_gla", lambda: mamba(128))
    if args.slow_peers:
        rows.measure("op merged gla (1024, 2048), fla, M of ones", lambda: gla(1, 1024, 2048))


def linear_layers(rows: Rows, args: argparse.Namespace) -> None:
    """Whole layers by our own kernels, also where peers are installed; "times" compares with the row before."""
    gla = {"type": "gla", "num_heads": 4, "key_dim": 256, "value_dim": 512}
    mamba = {"type": "mamba2", "inner_dim": 4096, "head_dim": 64}
    pairs = {
        "gla of the 1.3B model": (gla, gla | {"merged": True}),
        "mamba2 of the 1.3B model, N 128 and 512": (mamba | {"state_dim": 128}, mamba | {"state_dim": 512}),
    }
    for name, (plain, larger) in pairs.items():
        times: dict[str, float] = {}

        def measure(description: dict[str, Any], which: str, times: dict[str, float] = times) -> dict[str, Any]:
            values = layer(description, args.batch, args.length, 2048)
            times[which] = values["both_ms"]
            if "plain" in times and which == "larger":
                values["times"] = times["larger"] / times["plain"]
            return values

        with mock.patch.dict(os.environ, LONGRECALL_BACKEND="triton"):
            rows.measure(f"layer {name}, plain", lambda plain=plain, measure=measure: measure(plain, "plain"))
            rows.measure(
                f"layer {name}, larger state", lambda larger=larger, measure=measure: measure(larger, "larger")
            )


def delta_layers(rows: Rows, args: argparse.Namespace) -> None:
    """Gated DeltaNet of d 1024, 8 heads of 128, at 8 x 4096: ours at E = 1 to 16, peers' at 1 and 8, and attention."""
    import gpu_peer_kernels
    import gpu_peers

    os.environ["FLA_FLASH_QLA"] = "0"
    for name in peers.PEERS:
        rows.add(f"backend {name}", reason=peers.why_not_here(name))
    gpu_peer_kernels.shorter_tuning()
    gpu_peers.beside(rows, lambda: 600.0, factors=(1, 2, 4, 8, 16))


FIRST_CALL = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import gpu_delta
torch.zeros(1, 1, device="cuda") @ torch.zeros(1, 1, device="cuda")
forward, leaves = gpu_delta.layer((8, 4096), int(sys.argv[2]), "ours")
for leaf in leaves:
    leaf.requires_grad_()
torch.cuda.synchronize()
began = time.perf_counter()
forward().sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def first_calls(rows: Rows, args: argparse.Namespace) -> None:
    """Seconds of a layer's first forward and backward where nothing is compiled yet: processes with empty caches."""

    def measure(factor: int) -> dict[str, Any]:
        words = [sys.executable, "-c", FIRST_CALL, str(Path(__file__).parent), str(factor)]
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                words, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True, check=True
            )
        return {"seconds": float(done.stdout.splitlines()[-1])}

    for factor in (1, 8):
        rows.measure(f"first call of layer E={factor} ours", lambda factor=factor: measure(factor))


def scan_ops(rows: Rows, args: argparse.Namespace) -> None:
    """Mamba's selective scan with 16 numbers a channel, in float32 as in its layer: small models, and one of 130M."""

    def scan(batch: int, length: int, channels: int, backend: str) -> dict[str, Any]:
        x, b, c = (random(batch, length, width, dtype=torch.float32) for width in (channels, 16, 16))
        step = F.softplus(torch.randn(batch, length, channels, device="cuda") - 4).requires_grad_()
        a = (-torch.arange(1.0, 17.0, device="cuda").repeat(channels, 1)).requires_grad_()
        op = lambda: selective_scan(x, step, a, b, c, backend=backend)[0]  # noqa: E731
        return timed(op, [x, step, a, b, c])

    for batch, length, channels in ((128, 64, 64), (256, 256, 128), (512, 512, 512), (8, 2048, 1536)):
        for backend in args.backends:
            name = f"op selective scan {batch} x {length} x {channels}, {backend}"
            sizes = (batch, length, channels, backend)
            rows.measure(name, lambda sizes=sizes: scan(*sizes))


def layer(description: dict[str, Any], batch: int, length: int, width: int) -> dict[str, Any]:
    """One mixer of random weights."""
    mixer = mixer_config(description).build(width).to("cuda", torch.bfloat16)
    x = random(batch, length, width)
    position = torch.zeros(batch, dtype=torch.long, device="cuda")
    return timed(lambda: mixer(x, None, mask=None, position=position)[0], [x, *mixer.parameters()])


SECTIONS: dict[str, list[Callable[[Rows, argparse.Namespace], None]]] = {
    "layers": [linear_layers, delta_layers],
    "first": [first_calls],
    "linear": [linear_ops, linear_peers],
    "scan": [scan_ops],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--backends", nargs="+", default=["triton"], help="of our ops [triton]")
    parser.add_argument("--slow-peers", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=None, help="JSON file, written after every row")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = Rows("gpu_layers", args.out)
    for section in args.only:
        for measure in SECTIONS[section]:
            measure(rows, args)


if __name__ == "__main__":
    main()
