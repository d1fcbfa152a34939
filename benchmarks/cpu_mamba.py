"""The Mamba layer on the CPU against transformers' own, which falls back to plain torch there.

    python benchmarks/cpu_mamba.py --threads 2 --out benchmarks/results/cpu_mamba.json

One layer of the 130m model (hidden size 768, 1536 channels of 16 numbers), float32, B=1, T=1024, the same weights on
both sides. Ours and the peer's run in turn, and the ratio is the median of the ratios of neighbours; outputs and the
gradients of the input and of every parameter are compared first, at 256 tokens. Absolute times of a shared CPU mean
nothing and are not kept. At every step the peer's backward fills a gradient of all time with zeros: its cost grows with
the square of T, so that the ratio holds for this T alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

# See cpu_timing.py: a spinning thread holds up the one it waits for on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from cpu_timing import OtherPrograms, cpu_parser, disagreement, ratio_of, recorded
from torch import Tensor, nn

from longrecall.layers.mixers.registry import mixer_config

SIZES = {"hidden": 768, "inner": 1536, "state": 16, "rank": 48}
# Float32 sums of a thousand steps and products over 1536 channels, in another order.
AGREEMENT = 1e-3

Run = Callable[[Tensor, Tensor], list[Tensor]]


def layers() -> tuple[nn.Module, nn.Module]:
    """Our layer and transformers', with the same random weights."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    sizes = {"hidden_size": SIZES["hidden"], "state_size": SIZES["state"], "num_hidden_layers": 1}
    peer = MambaMixer(MambaConfig(**sizes), layer_idx=0)
    description = {"type": "mamba", "inner_dim": SIZES["inner"], "state_dim": SIZES["state"], "dt_rank": SIZES["rank"]}
    ours = mixer_config(description).build(SIZES["hidden"])
    weights = {name.replace("conv1d", "conv"): tensor for name, tensor in peer.state_dict().items()}
    ours.load_state_dict({n: t.squeeze(1) if n == "conv.weight" else t for n, t in weights.items()})
    return ours, peer


def forward(layer: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Run:
    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [layer(x)]

    return run


def forward_backward(layer: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Run:
    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], weight)]

    return run


def sides() -> dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """For ours and the peer: the layer as a function of x alone, and its parameters in one order."""
    ours, peer = layers()
    names = [name for name, _ in ours.named_parameters()]
    theirs = {name.replace("conv1d", "conv"): tensor for name, tensor in peer.named_parameters()}

    def our_layer(x: Tensor) -> Tensor:
        return ours(x, None, mask=None, position=torch.zeros(x.shape[0], dtype=torch.long))[0]

    return {
        "ours": (our_layer, [parameter for _, parameter in ours.named_parameters()]),
        "peer": (lambda x: peer(x), [theirs[name] for name in names]),
    }


def compare(length: int) -> float:
    """Largest difference of the output or any gradient, relative to the largest entry of its tensor."""
    found, expected = (forward_backward(*side)(*inputs(length)) for side in sides().values())
    return disagreement(found, [b.view_as(a) for a, b in zip(found, expected, strict=True)])


def inputs(length: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of y, ``[1, T, d]``."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(1, length, SIZES["hidden"], generator=generator) for _ in range(2))
    return x, weight


def measure(length: int, make: Callable[..., Run], repeats: int) -> dict[str, float]:
    """Ratios peer / ours of neighbouring runs; ours is warmed up, the peer needs no warming beside its own length."""
    x, weight = inputs(length)
    runs = {name: make(*side) for name, side in sides().items()}
    runs["ours"](x, weight)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run(x, weight)
            times[name].append(time.perf_counter() - start)
        ours, peer = times["ours"][-1], times["peer"][-1]
        print(f"  peer / ours: {peer:.2f} s / {ours:.3f} s = {peer / ours:.1f}", flush=True)
    return ratio_of(times["peer"], times["ours"])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = cpu_parser(__doc__, threads=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument(
        "--repeats", type=int, default=2, help="pairs per pass; a pair takes minutes at the default length"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    others = OtherPrograms()
    error = compare(min(options.length, 256))
    if error > AGREEMENT:
        raise RuntimeError(f"ours and the peer differ by {error:.1e}; a timing would mean nothing")
    row: dict[str, object] = {
        "layer": "Mamba, 130m size",
        "peer": "transformers MambaMixer",
        "largest_relative_difference": error,
    }
    for label, make in (("forward", forward), ("forward_backward", forward_backward)):
        print(label)
        row[label] = measure(options.length, make, options.repeats)
    settings = {"batch": 1, "length": options.length, "repeats": options.repeats, **SIZES}
    return recorded(options, settings, [row], cores_busy_elsewhere=others.cores())


if __name__ == "__main__":
    main()
