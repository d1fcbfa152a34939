"""Decoding and prefill on one GPU: the step's kernels against the copy bandwidth, whole models, ours beside peers.

    python benchmarks/gpu_decoding.py --out benchmarks/results/gpu_decoding.json

Times are medians of CUDA events. The recurrence kernels go round states of 64 MiB or more, 512 MiB in all as of several
layers, so that none is in the L2 cache when its turn comes; "share" is state bytes read and written per second over the
copy rate, measured over 4 GiB; "ahead_ms" and "ahead_share" are those of launches that may read states while the kernel
before is at work, as in a step (ops/execution.py); "copy_ms" is what torch takes to copy such a state to another
place, in the same way. A model's step is what `generate()` replays for every token; tokens per second include the
choice of the token.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longrecall.inference.reading import captured_segments, captured_step, read_prompt
from longrecall.models.description import read_description
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import prefetching

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, copy_rate, median_ms, replayed_ms

BATCH = 64
STATES = {
    "gated_delta_net 8 x 128 x 128, batch 256": (256, 8, 128, 128, "delta"),
    "gated_delta_net 64 subheads x 128 x 128": (BATCH, 64, 128, 128, "delta"),
    "gla 4 x 256 x 512": (BATCH, 4, 256, 512, "channel"),
    "gla merged 4 x 256 x 2048": (BATCH, 4, 256, 2048, "channel"),
    "mamba2 64 x 128 x 64": (BATCH, 64, 128, 64, "step"),
    "mamba2 64 x 512 x 64": (BATCH, 64, 512, 64, "step"),
}
ROUND = 2**29
"""Bytes of states that the launches of a graph go round at least."""
CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"


def kernels(rows: Rows) -> None:
    """The recurrence kernel of one layer."""
    from longrecall.ops.decoding.triton.recurrence import Gate, recurrence

    rate = copy_rate()
    rows.add("copy", bytes_per_second=rate)
    for name, (batch, heads, keys, values, kind) in STATES.items():
        for dtype in (torch.float32, torch.bfloat16):

            def measure(batch=batch, heads=heads, keys=keys, values=values, kind=kind, dtype=dtype) -> dict[str, Any]:
                def random(*shape: int) -> torch.Tensor:
                    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

                size = batch * heads * keys * values * dtype.itemsize
                states = [
                    torch.randn(batch, heads, keys, values, device="cuda").to(dtype)
                    for _ in range(max(2, -(-ROUND // size)))
                ]
                turns = itertools.cycle(states)
                groups = 1 if kind == "step" else heads
                q, k, v = random(batch, groups * keys), random(batch, groups * keys), random(batch, heads * values)
                gate = {
                    "delta": lambda: Gate("delta", random(batch, heads), random(heads), random(heads)),
                    "channel": lambda: Gate("channel", random(batch, heads * keys), divisor=16.0),
                    "step": lambda: Gate("step", random(batch, heads), random(heads), random(heads)),
                }[kind]()
                extra: dict[str, Any] = {"beta": random(batch, heads), "normalise": True} if kind == "delta" else {}
                given = {"scale": 0.1, "key_heads": groups, "value_heads": heads, **extra}

                def step() -> None:
                    recurrence(q, k, v, next(turns), gate, **given)

                milliseconds = replayed_ms(step)
                with prefetching():
                    ahead = replayed_ms(step)
                copies = itertools.cycle([torch.empty_like(state) for state in states])
                return {
                    "ms": milliseconds,
                    "copy_ms": replayed_ms(lambda: next(copies).copy_(next(turns))),
                    "state_mib": size / 2**20,
                    "share": 2 * size / (milliseconds / 1e3) / rate,
                    "ahead_ms": ahead,
                    "ahead_share": 2 * size / (ahead / 1e3) / rate,
                }

            rows.measure(f"step kernel, {name}, {str(dtype).removeprefix('torch.')}", measure)


def build(name: str) -> RecurrentLM:
    """A published configuration with random bf16 weights on the GPU."""
    config = read_description(CONFIGS / f"{name}.json")
    with torch.device("cuda"):
        model = RecurrentLM(config)
    return model.to(torch.bfloat16).eval()


@torch.inference_mode()
def prefill_ms(model: RecurrentLM, batch: int, length: int, repeats: int) -> float:
    """Median time of one forward pass that keeps the state and the last logits."""
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")
    return median_ms(lambda: model(ids, logits_to_keep=1, use_cache=True), repeats=repeats)


@torch.inference_mode()
def captured_prefill_ms(model: RecurrentLM, length: int) -> float:
    """The same for one row as `generate()` reads a long prompt."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
    segment = captured_segments(model, 1)
    return median_ms(lambda: read_prompt(model, segment, ids, None), repeats=5)


@torch.inference_mode()
def models(rows: Rows, names: list[str]) -> None:
    """Decoding and prefill of whole models."""
    for name in names:
        one_model(rows, name, build(name))
        torch.cuda.empty_cache()


def one_model(rows: Rows, name: str, model: RecurrentLM) -> None:
    for batch, length, repeats in ((1, 4096, 10), (8, 4096, 5), (1, 65536, 3)):
        rows.measure(
            f"{name}: prefill {batch} x {length}",
            lambda batch=batch, length=length, repeats=repeats: {"ms": prefill_ms(model, batch, length, repeats)},
        )
    rows.measure(f"{name}: prefill 1 x 4096, captured", lambda: {"ms": captured_prefill_ms(model, 4096)})
    rows.measure(f"{name}: prefill 1 x 65536, captured", lambda: {"ms": captured_prefill_ms(model, 65536)})
    for batch in (1, 64, 256):
        rows.measure(f"{name}: decoding, batch {batch}", lambda batch=batch: decoding(model, batch))
    model.captured_steps.clear()
    rows.measure(f"{name}: decoding without a graph, batch 1", lambda: without_graph(model))


def decoding(model: RecurrentLM, batch: int, count: int = 256) -> dict[str, Any]:
    """The captured step alone, and generate() from a short prompt; the first call's capture is timed apart."""
    began = time.perf_counter()
    step = captured_step(model, batch)
    torch.cuda.synchronize()
    capture = time.perf_counter() - began
    step.ids.random_(0, model.config.vocab_size)
    milliseconds = median_ms(step, repeats=100)
    whole = generation_seconds(model, batch, count)
    return {
        "ms": milliseconds,
        "first_call_seconds": capture,
        "generate_ms_per_token": 1e3 * whole / count,
        "tokens_per_second": batch * count / whole,
        "state_mib": batch * model.state_size() * 4 / 2**20,
    }


def generation_seconds(model: RecurrentLM, batch: int, count: int) -> float:
    """Wall-clock of generate() for `count` tokens after a prompt of 16, without the prompt's own time."""
    ids = torch.randint(0, model.config.vocab_size, (batch, 16), device="cuda")
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def timed(new: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=None, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    timed(4)
    return timed(count + 1) - timed(1)


def without_graph(model: RecurrentLM) -> dict[str, Any]:
    """The same loop layer by layer, as it runs without a captured step."""
    model.decoding.graphs = False
    try:
        return {"generate_ms_per_token": 1e3 * generation_seconds(model, 1, 16) / 16}
    finally:
        model.decoding.graphs = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["kernels", "models"], help="one part [both]")
    parser.add_argument("--models", default="gated_delta_net_400m,gla_400m", help="recipes/configs [%(default)s]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("gpu_decoding", args.out)
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: kernels(rows),
        "models": lambda: models(rows, args.models.split(",")),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part()


if __name__ == "__main__":
    main()
