"""The gated delta rule and layers with subheads on a GPU: time and memory, with fla's and FlashQLA's beside them.

    python benchmarks/gpu_delta.py --out result.json
    python benchmarks/gpu_delta.py --only layers --factors 1,8

Medians of CUDA events in milliseconds; peaks in GiB count what is allocated before (weights, inputs). A layer has
d 1024, 8 heads of 128 and reads 8 x 4096 tokens in bfloat16 unless the options say otherwise. "graph_ms" is forward and
backward of our layer replayed as a CUDA graph: what the GPU takes where it does not wait for Python. A peer's layer is
ours with its kernel in place of the recurrence. What cannot run is a row with its error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Rows, median_ms, peak_gib, replayed_ms
from torch import Tensor

from longrecall.layers.mixers.delta_net import GatedDeltaNetConfig
from longrecall.layers.norm import l2_normalise
from longrecall.ops import gated_delta_rule
from longrecall.ops.delta_rule.subheads import subhead_delta_rule

HEADS, WIDTH, HIDDEN = 8, 128, 1024
DEVICE = "cuda"


def peers() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """The recurrences of other packages, by name; those that are not installed are left out."""
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_rule
    except ImportError:
        print("fla is not installed")
    else:
        found["fla"] = lambda q, k, v, g, beta: fla_rule(q, k, v, g, beta, output_final_state=True)
    try:
        from flash_qla import chunk_gated_delta_rule as flash_rule
    except ImportError:
        print("flash_qla is not installed")
    else:
        found["FlashQLA"] = lambda q, k, v, g, beta: flash_rule(q, k, v, g, beta, output_final_state=True)
    return found


def inputs(rows: int, length: int, factor: int) -> list[Tensor]:
    """q, k, v, log decay and beta of one layer's recurrence; q, k and v in bfloat16."""
    g = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    q, k = (l2_normalise(randn(rows, length, HEADS * factor, WIDTH)).bfloat16() for _ in range(2))
    decay = -torch.rand(rows, length, HEADS * factor, generator=g, device="cuda") * 0.1
    beta = torch.rand(rows, length, HEADS * factor, generator=g, device="cuda")
    return [q, k, randn(rows, length, HEADS, WIDTH).bfloat16(), decay, beta]


def timed(forward: Callable[..., Tensor], leaves: list[Tensor], *, graph: bool = False) -> dict[str, Any]:
    """Forward without gradients, forward and backward, the peak of the latter and, asked for, its time as a graph."""
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.randn_like(forward())

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(upstream)

    with torch.no_grad():
        once = median_ms(forward, repeats=20)
    values = {"forward_ms": once, "both_ms": median_ms(both, repeats=20), "peak_gib": peak_gib(both)}
    if graph:
        values["graph_ms"] = replayed_ms(lambda: torch.autograd.grad(forward(), leaves, upstream), launches=1)
    return values


def recurrences(rows: Rows, size: tuple[int, int], factors: list[int]) -> None:
    """The recurrence alone: values shared and outputs summed by ours, repeated and not summed by the others."""
    for factor in factors:
        tensors = inputs(*size, factor)
        rows.measure(f"rule E={factor} ours", lambda x=tensors: timed(lambda: subhead_delta_rule(*x)[0], x))
        repeated = [x.repeat_interleave(factor, 2) if n == 2 else x for n, x in enumerate(tensors)]
        others = {"ours, repeated values": gated_delta_rule, **peers()}
        for name, rule in others.items():
            rows.measure(f"rule E={factor} {name}", lambda x=repeated, f=rule: timed(lambda: f(*x)[0], x))


def parts(rows: Rows, size: tuple[int, int], factors: list[int]) -> None:
    """Every kernel of ours by itself, and the convolution."""
    from longrecall.ops.convolution.triton.short import convolve_heads
    from longrecall.ops.delta_rule.triton import chunked as delta_rule
    from longrecall.ops.delta_rule.triton.plan import plan_of

    for factor in factors:
        q, k, v, decay, beta = inputs(*size, factor)
        state = torch.zeros(q.shape[0], q.shape[2], WIDTH, WIDTH, device="cuda")
        gates = delta_rule.complete(v, decay, beta, None, state)
        plan = plan_of(q, v, beta, WIDTH**-0.5)
        solved = delta_rule._invert(plan, k, decay, beta)
        taps, z = torch.randn(q[0, 0].numel(), 4, device="cuda").bfloat16(), q.detach()
        works: dict[str, Callable[[], Any]] = {
            "invert": lambda a=(plan, k, decay, beta): delta_rule._invert(*a),
            "walk, reading": lambda a=(plan, (q, k, *gates), solved): delta_rule._walk(*a, read=True),
            "walk, keeping states": lambda a=(plan, (q, k, *gates), solved): delta_rule._walk(*a, read=False),
        }
        for name, work in works.items():
            rows.measure(f"kernel E={factor} {name}", lambda w=work: {"ms": median_ms(w, repeats=20)})
        rows.measure(
            f"kernel E={factor} convolution, SiLU, norm",
            lambda z=z, taps=taps: timed(lambda: convolve_heads(z, taps, None, normalise=True), [z, taps]),
        )
        kernels_of_backward(rows, factor, plan.scale, (q, k, *gates), v)


def kernels_of_backward(rows: Rows, factor: int, scale: float, tensors: tuple[Tensor, ...], v: Tensor) -> None:
    """One profiled backward, its kernels by name."""
    from longrecall.ops.delta_rule.triton import chunked as delta_rule

    final = torch.zeros_like(tensors[-1])
    solved = delta_rule.forward(scale, *tensors)[2:]
    delta_rule.backward(scale, tensors, solved, torch.randn_like(v), final)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        delta_rule.backward(scale, tensors, solved, torch.randn_like(v), final)
    for event in sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:8]:
        rows.add(
            f"backward E={factor} {event.key[:60]}", ms=event.self_device_time_total / 1e3, launches=int(event.count)
        )


def layers(rows: Rows, size: tuple[int, int], factors: list[int], others: tuple[int, ...] | None = None) -> None:
    """The whole Gated DeltaNet layer, output gate and projections included; peers' kernels at E in `others` [all]."""
    for factor in factors:
        for name in ("ours", *(peers() if others is None or factor in others else ())):
            # A layer of its own for each row, so that a peak counts nothing that another row has left.
            rows.measure(
                f"layer E={factor} {name}", lambda e=factor, n=name: timed(*layer(size, e, n), graph=n == "ours")
            )
            torch.cuda.empty_cache()


def layer(size: tuple[int, int], factor: int, name: str) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The forward of one layer with "ours" or a peer's recurrence, and what its backward takes gradients of."""
    expansion = {"expansion": {"kind": "headwise", "factor": factor}} if factor > 1 else {}
    config = {"num_heads": HEADS, "key_dim": WIDTH, "value_dim": WIDTH, **expansion}
    torch.manual_seed(0)
    mixer = GatedDeltaNetConfig.from_dict(config).build(HIDDEN).to(DEVICE, torch.bfloat16)
    x = torch.randn(*size, HIDDEN, device=DEVICE).bfloat16()
    position = torch.zeros(size[0], dtype=torch.long, device=DEVICE)

    rule = None if name == "ours" else peers()[name]

    def ours() -> Tensor:
        return mixer(x, None, mask=None, position=position)[0]

    def with_peer() -> Tensor:
        projected = mixer.projections(x)
        q, k, v, _ = mixer.heads(projected, x, None, None)
        q, k = l2_normalise(q.float()).bfloat16(), l2_normalise(k.float()).bfloat16()
        decay, beta = mixer.gates(projected)
        return mixer.output(rule(q, k, mixer.share_values(v), decay, beta)[0], projected, x.dtype)

    return ours if rule is None else with_peer, [x, *mixer.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["rules", "kernels", "layers"], help="one part [all]")
    parser.add_argument("--factors", default="1,2,4,8,16", help="expansions E [%(default)s]")
    parser.add_argument("--rows", type=int, default=8, help="batch [%(default)s]")
    parser.add_argument("--length", type=int, default=4096, help="tokens [%(default)s]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("gpu_delta", args.out)
    factors = [int(factor) for factor in args.factors.split(",")]
    for name, part in {"layers": layers, "rules": recurrences, "kernels": parts}.items():
        if args.only in (None, name):
            part(rows, (args.rows, args.length), factors)


if __name__ == "__main__":
    main()
