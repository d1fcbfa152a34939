"""Decoding with weights of one byte a number and with states in bfloat16, on one GPU.

    python benchmarks/gpu_quantised.py --out benchmarks/results/gpu_quantised.json

Weights are random, in bfloat16 or quantised from it by torchao (`longrecall.models.quantising`). Of `generate()`:
milliseconds a token by the wall clock, without the prompt (16 tokens) and the first token; `step_ms` is the median of
the captured step alone, by CUDA events; `weights_gb` is what a token reads of weights, and `read_gbs` that by the
step's time. `off` is how far the step's logits are from those of a forward pass of the same model, which
multiplies by torchao's own product: the largest difference over the standard deviation of the logits. "products": the
kernels of one layer's weights, in a CUDA graph over 24 layers; for many rows beside torchao's own. ``--tiny`` runs a
small model on whatever there is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from gpu_calls import CONFIGS, DEVICE, TINY, generated
from gpu_timing import Rows, copy_rate, median_ms, replayed_ms

from longrecall.inference.reading import captured_step
from longrecall.inference.step import DecodingStep
from longrecall.models.captured_steps import parts_of
from longrecall.models.config import RecurrentConfig
from longrecall.models.description import read_description
from longrecall.models.quantising import CONFIGS as KINDS
from longrecall.models.quantising import quantise
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import prefetching
from longrecall.ops.row_scaled import RowScaled

LAYERS = 24
SHAPES = {"400M": (1024, 2816), "1.3B": (2048, 5632)}
"""Channels of the stream and of the MLP."""
ONE, LARGE = 1, 256


def build(name: str, kind: str, *, tiny: bool) -> RecurrentLM:
    """A model with random weights, quantised unless the kind is "bf16"."""
    config = RecurrentConfig(**TINY) if tiny else read_description(CONFIGS / f"{name}.json")
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = RecurrentLM(config).to(torch.bfloat16).eval()
    if kind != "bf16":
        quantise(model, kind)
    return model


def weight_bytes(model: RecurrentLM) -> int:
    """What a token reads of weights: all but the table of embeddings, of which it reads a row."""
    found = 0
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            found += sum(part.nbytes for weight in module._parameters.values() if weight is not None
                         for part in parts_of(weight))  # fmt: skip
    return found


@torch.no_grad()
def off(model: RecurrentLM, batch: int) -> float:
    """How far the step's logits are from a forward pass; see above."""
    ids = torch.randint(0, model.config.vocab_size, (batch, 33), device=DEVICE)
    before = model(ids[:, :-1], use_cache=True, logits_to_keep=1)
    expected = model(ids[:, -1:], past_key_values=before.past_key_values).logits[:, -1].float()
    step = captured_step(model, batch) if DEVICE == "cuda" else DecodingStep(model, batch)
    step.load(before.past_key_values)
    step.ids.copy_(ids[:, -1])
    return float((step().float() - expected).abs().max() / expected.std())


def decoding(model: RecurrentLM, batch: int, count: int) -> dict[str, Any]:
    """generate(), and the step alone."""
    began = time.perf_counter()
    found = generated(model, batch, count)
    if DEVICE == "cuda":
        step = captured_step(model, batch)
        step.ids.random_(0, model.config.vocab_size)
        found["step_ms"] = median_ms(step, repeats=100)
        found["weights_gb"] = weight_bytes(model) / 1e9
        found["read_gbs"] = found["weights_gb"] / found["step_ms"] * 1e3
    return found | {"off": off(model, batch), "seconds_of_the_row": time.perf_counter() - began}


def models(rows: Rows, names: Sequence[str], batches: Sequence[int], kinds: Sequence[str], *, tiny: bool) -> None:
    """Every kind of weights."""
    for name, kind in itertools.product(names, kinds):
        held: list[RecurrentLM] = []
        begin = f"{name}: {kind} weights"
        rows.measure(f"{begin}, made", lambda name=name, kind=kind, held=held: made(held, name, kind, tiny))
        for batch in batches if held else ():
            count = 20 if tiny else 256 if batch == 1 else 64
            row = f"{begin}, generate, batch {batch}"
            rows.measure(row, lambda batch=batch, held=held, count=count: decoding(held[0], batch, count))
        held.clear()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def made(held: list[RecurrentLM], name: str, kind: str, tiny: bool) -> dict[str, Any]:
    """Build a model into `held`; how long that takes."""
    began = time.perf_counter()
    held.append(build(name, kind, tiny=tiny))
    return {"seconds": time.perf_counter() - began, "weights_gb": weight_bytes(held[0]) / 1e9}


def states(rows: Rows, name: str, batch: int, *, tiny: bool) -> None:
    """The dtypes of states."""
    model = build(name, "bf16", tiny=tiny)
    for dtype in (torch.float32, torch.bfloat16):
        model.decoding.state_dtype = dtype
        row = f"{name}: {str(dtype).removeprefix('torch.')} states, generate, batch {batch}"
        rows.measure(row, lambda: decoding(model, batch, 20 if tiny else 64))
        model.captured_steps.clear()


def products(rows: Rows) -> None:
    """The kernels that read weights at batch 1, on weights that do not fit into the L2 cache."""
    from longrecall.ops.decoding.triton.products import add_product, norm_and_gate_up, norm_and_project

    rows.add("copy", bytes_per_second=copy_rate())
    for (shape, (wide, inner)), kind in itertools.product(SHAPES.items(), ("bf16", *KINDS)):

        def weight(count: int, size: int, kind: str = kind) -> Tensor | RowScaled:
            plain = torch.randn(count, size, device="cuda")
            if kind == "bf16":
                return plain.bfloat16()
            dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
            return RowScaled((plain * 30).clamp(-127, 127).to(dtype), torch.ones(count, device="cuda"), torch.bfloat16)

        def measure(wide: int = wide, inner: int = inner, weight: Callable[..., Any] = weight) -> dict[str, Any]:
            x, norm = torch.randn(1, wide, device="cuda"), torch.ones(wide, device="cuda").bfloat16()
            y, z = (torch.randn(1, size, device="cuda").bfloat16() for size in (wide, inner))
            layers = [
                ([weight(wide, wide) for _ in range(4)], weight(wide, wide), weight(inner, wide), weight(inner, wide),
                 weight(wide, inner))
                for _ in range(LAYERS)
            ]  # fmt: skip
            turns = [itertools.cycle(layers) for _ in range(4)]
            work = {
                "projections": lambda: norm_and_project(x, norm, 1e-6, next(turns[0])[0]),
                "output": lambda: add_product(y, next(turns[1])[1], x),
                "gate_up": lambda: norm_and_gate_up(x, norm, 1e-6, *next(turns[2])[2:4]),
                "down": lambda: add_product(z, next(turns[3])[4], x),
            }
            numbers = {"projections": 4 * wide * wide, "output": wide * wide, "gate_up": 2 * wide * inner}
            numbers["down"] = wide * inner
            found: dict[str, Any] = {}
            for name, one in work.items():
                with prefetching():
                    milliseconds = replayed_ms(one, launches=LAYERS)
                size = numbers[name] * (2 if isinstance(layers[0][1], Tensor) else 1)
                found |= {f"{name}_us": 1e3 * milliseconds, f"{name}_gbs": size / milliseconds / 1e6}
            return found

        rows.measure(f"products of {shape}, {kind} weights", measure)


def wide_products(rows: Rows) -> None:
    """Products of many rows: the library's in bfloat16, torchao's, and the kernel that converts tiles."""
    from torch.nn import functional as F

    from longrecall.ops.decoding.triton.wide_products import wide_product
    from longrecall.ops.row_scaled import row_scaled

    for (shape, (wide, inner)), batch in itertools.product(SHAPES.items(), (8, 64, LARGE)):

        def measure(wide: int = wide, inner: int = inner, batch: int = batch) -> dict[str, Any]:
            x = torch.randn(batch, wide, device="cuda").bfloat16()
            found: dict[str, Any] = {}
            for kind in ("bf16", *KINDS):
                layers = nn.ModuleList(nn.Linear(wide, inner, bias=False) for _ in range(LAYERS)).cuda().bfloat16()
                if kind != "bf16":
                    quantise(layers, kind)
                turn = itertools.cycle(layers)
                found[f"{kind}_us"] = 1e3 * replayed_ms(lambda turn=turn: F.linear(x, next(turn).weight), LAYERS)
                if kind == "bf16":
                    continue
                parts = [row_scaled(layer.weight) for layer in layers]
                turn = itertools.cycle(parts)
                found[f"{kind}_kernel_us"] = 1e3 * replayed_ms(lambda turn=turn: wide_product(x, next(turn)), LAYERS)
                expected = x.double() @ (parts[0].numbers.double() * parts[0].scales.double()[:, None]).T
                off = (wide_product(x, parts[0]).double() - expected).abs().max()
                found[f"{kind}_kernel_off"] = float(off / expected.std())
            return found

        rows.measure(f"product {inner} x {wide} of {shape}, {batch} rows", measure)


OTHERS = ("gated_delta_net_1.5b", "mamba2_1.3b")
PARTS = ("gla", "400m", "states", "products", "wide", "others")
"""What was asked for first, should the time end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the rows [all]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows, tiny, large = Rows("gpu_quantised", args.out), args.tiny, 4 if args.tiny else LARGE
    kinds = ("bf16", *KINDS)
    work: dict[str, Callable[[], None]] = {
        "gla": lambda: models(rows, ["gla_1.3b"], [ONE], kinds, tiny=tiny),
        "400m": lambda: models(rows, ["gated_delta_net_400m"], [ONE, large], kinds, tiny=tiny),
        "states": lambda: states(rows, "gated_delta_net_400m_e8", large, tiny=tiny),
        "products": lambda: products(rows) if DEVICE == "cuda" else None,
        "wide": lambda: wide_products(rows) if DEVICE == "cuda" else None,
        "others": lambda: models(
            rows, [] if tiny else ["gated_delta_net_1.5b", "mamba2_1.3b"], [ONE], kinds, tiny=tiny
        ),
    }
    with torch.no_grad():
        for part in args.parts:
            work[part]()


if __name__ == "__main__":
    main()
