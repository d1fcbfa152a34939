"""The calls that everybody makes, on one GPU: `model(ids)` without gradients, and `generate()`.

    python benchmarks/gpu_calls.py --out benchmarks/results/gpu_calls.json

bfloat16 weights. The first model has every row, the others the shorter calls. Of a plain call: the median of CUDA
events (`ms`) and of the wall clock from the call until the GPU has ended (`wall_ms`), and the peak of memory beyond
what was allocated before. Of `generate()`: milliseconds a token by the wall clock, without the prompt (16 tokens) and
the first token. "busy host": two processes spin on every core meanwhile. ``--tiny`` runs a small model on whatever
there is, to test the script.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms

from longrecall.models.config import RecurrentConfig
from longrecall.models.description import read_description
from longrecall.models.recurrent_lm import RecurrentLM

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
MODELS = ("gated_delta_net_400m", "gla_400m", "gla_1.3b", "mamba2_1.3b", "gated_delta_net_1.5b")
TINY = {"vocab_size": 90, "hidden_size": 16, "layers": [{"mixer": {"type": "gla", "num_heads": 2, "key_dim": 8}}]}
TINY["layers"][0]["mixer"]["value_dim"] = 8  # type: ignore[index]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def finish() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def wall_ms(work: Callable[[], Any], repeats: int, warmup: int = 3) -> float:
    """Median milliseconds by the wall clock."""
    for _ in range(warmup):
        work()
    found = []
    for _ in range(repeats):
        finish()
        began = time.perf_counter()
        work()
        finish()
        found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def called(model: RecurrentLM, rows: int, length: int, repeats: int, **options: Any) -> dict[str, Any]:
    """A plain call over random tokens."""
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=DEVICE)

    def work() -> None:
        model(ids, **options)

    found: dict[str, Any] = {"wall_ms": wall_ms(work, repeats)}
    if DEVICE == "cuda":
        found["ms"] = median_ms(work, repeats, 1)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        found["peak_gib_beyond"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    milliseconds = found.get("ms", found["wall_ms"])
    # Two FLOPs for each number of a matrix that a token meets, logits left out.
    met = sum(x.numel() for x in model.model.layers.parameters())
    return (
        found
        | {"tokens_per_second": rows * length / milliseconds * 1e3}
        | {"tflops": 2 * met * rows * length / milliseconds / 1e9}
    )


def generated(model: RecurrentLM, batch: int, count: int, **options: Any) -> dict[str, Any]:
    """generate() of `count` tokens."""
    ids = torch.randint(0, model.config.vocab_size, (batch, 16), device=DEVICE)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options

    def seconds(new: int) -> float:
        finish()
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=new, **options)
        finish()
        return time.perf_counter() - began

    seconds(count + 1)
    seconds(1)
    whole = statistics.median(seconds(count + 1) - seconds(1) for _ in range(3))
    return {"ms_per_token": 1e3 * whole / count, "tokens_per_second": batch * count / whole}


@contextlib.contextmanager
def busy_host() -> Iterator[None]:
    """Two processes that spin on every core."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def one_model(rows: Rows, name: str, model: RecurrentLM, *, whole: bool, tiny: bool) -> None:
    """The rows of a model, all of them or the shorter calls."""
    short, long, longest, count, large = (64, 200, 2000, 20, 4) if tiny else (4096, 65536, 1 << 20, 512, 256)

    def add(what: str, work: Callable[[], dict[str, Any]]) -> None:
        rows.measure(f"{name}: {what}", work)

    add(f"call 1 x {short}, all logits", lambda: called(model, 1, short, 10))
    add(f"call 1 x {short}, last logits", lambda: called(model, 1, short, 10, logits_to_keep=1))
    add(f"call 8 x {short}, last logits", lambda: called(model, 8, short, 5, logits_to_keep=1))
    if not whole:
        return
    add(f"call 1 x {long}, last logits", lambda: called(model, 1, long, 3, logits_to_keep=1))
    add(f"call 1 x {longest}, last logits", lambda: called(model, 1, longest, 1, logits_to_keep=1))
    add("generate, batch 1", lambda: generated(model, 1, count))
    add("generate, batch 1, an end token", lambda: generated(model, 1, count, eos_token_id=model.config.vocab_size - 1))
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    add("generate, batch 1, sampling", lambda: generated(model, 1, count, **sampling))
    with busy_host():
        add("generate, batch 1, busy host", lambda: generated(model, 1, count))
    for dtype in (None, torch.bfloat16):
        model.decoding.state_dtype = dtype
        kind = "float32" if dtype is None else "bfloat16"
        add(f"generate, batch {large}, {kind} states", lambda: generated(model, large, count))
    model.decoding.state_dtype = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="recipes/configs [%(default)s]")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("gpu_calls", args.out)
    names = ["tiny"] if args.tiny else args.models.split(",")
    for name in names:
        config = RecurrentConfig(**TINY) if args.tiny else read_description(CONFIGS / f"{name}.json")
        with torch.device(DEVICE):
            model = RecurrentLM(config).to(torch.bfloat16).eval()
        with torch.inference_mode():
            one_model(rows, name, model, whole=name == names[0], tiny=args.tiny)
        del model
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
