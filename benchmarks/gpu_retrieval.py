"""What retrieval costs on one GPU: reading and continuing texts of 2k to 128k tokens with and without it.

    python benchmarks/gpu_retrieval.py --out benchmarks/results/gpu_retrieval.json

Models of 1.3 to 1.5 billion random bf16 weights: GLA, Mamba-2 and Gated DeltaNet, plain and with retrieval in the
first, middle and last layer (chunks of 64 tokens, 4 of them a token), and a softmax Transformer of the same size.
"overhead" is the time over that of the same model without retrieval, less 1. Reading is what `generate()` does with a
prompt: captured segments where the state allows them, one forward pass that keeps the state where not ("captured" says
which); its peak memory is that of one model alone. Continuing is `generate()` from that state: the choice of the token
and the loop around it included, the median of rounds in which both models take turns ("spread": largest less smallest,
over the median).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longrecall.inference.eligibility import why_no_graph
from longrecall.inference.reading import read_captured
from longrecall.inference.segments import EAGER_FIRST, SEGMENT
from longrecall.models.config import RecurrentConfig
from longrecall.models.description import read_description
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
LENGTHS = {2048: 10, 8192: 5, 32768: 2, 131072: 1}
"""Tokens of the text, and how often reading it is timed."""
LONGEST_ATTENTION_REPEATED = 32768
"""A Transformer reads longer texts once, without a warm-up: that takes seconds, and nothing is compiled for it."""
CONTINUED = 128
ROUNDS = 5
"""Continuations of each model, in turn with those of the other, so that a busy host is as busy for both."""
RETRIEVAL = {"type": "retrieval", "chunk": 64, "top_k": 4, "blend": "input", "alpha": 0.5}
GLA = {"type": "gla", "num_heads": 4, "key_dim": 256, "value_dim": 512}
MAMBA2 = {"type": "mamba2", "inner_dim": 4096, "head_dim": 64, "state_dim": 128}


def published(name: str) -> RecurrentConfig:
    """GLA and Mamba-2 at the sizes of their papers' 1.3B models, the others from recipes/configs."""
    if name == "gla_1.3b":
        return RecurrentConfig(vocab_size=32000, hidden_size=2048, layers=[{"mixer": GLA, "mlp_size": 5632}] * 24)
    if name == "mamba2_1.3b":
        return RecurrentConfig(vocab_size=50288, hidden_size=2048, layers=[{"mixer": MAMBA2}] * 48)
    return read_description(CONFIGS / f"{name}.json")


def with_retrieval(config: RecurrentConfig) -> RecurrentConfig:
    """The same model with retrieval around its first, middle and last mixer."""
    data = config.to_dict()
    layers = [dict(layer) for layer in data["layers"]]
    for index in (0, len(layers) // 2, len(layers) - 1):
        layers[index]["mixer"] = {**RETRIEVAL, "base": layers[index]["mixer"]}
    return RecurrentConfig.from_dict(data | {"layers": layers})


def build(config: RecurrentConfig) -> RecurrentLM:
    """Random bf16 weights on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = RecurrentLM(config)
    return model.to(torch.bfloat16).eval()


@dataclass
class Read:
    """The state after a text, kept for its continuation, and the memory that the model and all it keeps take."""

    state: RecurrentState | None = None
    held: int = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Memory that is taken inside, or given back, is this model's."""
        before = torch.cuda.memory_allocated()
        try:
            yield
        finally:
            self.held += torch.cuda.memory_allocated() - before


@torch.inference_mode()
def reading(model: RecurrentLM, length: int, repeats: int, warmup: int, kept: Read) -> dict[str, Any]:
    """Median time and peak memory of reading one row."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
    captured = False

    def once() -> None:
        nonlocal captured
        kept.state = None
        found = None if why_no_graph(model) else read_captured(model, ids, None)
        captured = found is not None
        kept.state = found[1] if found else model(ids, logits_to_keep=1, use_cache=True).past_key_values

    if length % SEGMENT and why_no_graph(model) is None:
        # The first rests are read eagerly, the next one is captured.
        warmup += EAGER_FIRST

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - kept.held
    with kept.counting():
        milliseconds = median_ms(once, repeats=repeats, warmup=warmup)
    peak = torch.cuda.max_memory_allocated() - others
    return {"ms": milliseconds, "peak_gib": peak / 2**30, "captured": captured}


@torch.inference_mode()
def continuing(models: dict[str, RecurrentLM], kept: dict[str, Read]) -> dict[str, dict[str, Any]]:
    """Median time of generate() for `CONTINUED` tokens after the text and one more, by the clock, less that for one."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def timed(name: str, count: int) -> float:
        state = kept[name].state
        assert state is not None
        ids = torch.zeros((1, 1), dtype=torch.long, device="cuda")
        mask = torch.ones((1, state.length + 1), dtype=torch.long, device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        models[name].generate(ids, attention_mask=mask, past_key_values=state, max_new_tokens=count, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    found: dict[str, list[float]] = {name: [] for name in models if kept[name].state is not None}
    for name in found:
        # The first call captures or compiles what it can; what is captured depends on the number of tokens.
        with kept[name].counting():
            timed(name, CONTINUED + 1)
    for _ in range(ROUNDS):
        for name, seconds in found.items():
            seconds.append(timed(name, CONTINUED + 1) - timed(name, 1))
    values = {}
    for name, seconds in found.items():
        milliseconds = 1e3 * statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
        values[name] = {"ms": milliseconds, "ms_per_token": milliseconds / CONTINUED, "spread": spread}
    return values


def measure(rows: Rows, configs: dict[str, RecurrentConfig]) -> None:
    """All rows of the models `configs`; "overhead" is over the first of them."""
    kept = {name: Read() for name in configs}
    models = {}
    for name, config in configs.items():
        with kept[name].counting():
            models[name] = build(config)
    attention = "attention" in [layer.mixer.type for layer in next(iter(configs.values())).layer_configs()]
    for name, model in models.items():
        rows.add(f"{name}: size", parameters=sum(p.numel() for p in model.parameters()))
    for length, repeats in LENGTHS.items():
        once = attention and length > LONGEST_ATTENTION_REPEATED
        began = time.perf_counter()
        first: float | None = None
        for name, model in models.items():

            def read(
                model: RecurrentLM = model, length: int = length, repeats: int = repeats, once: bool = once,
                kept: Read = kept[name],
            ) -> dict[str, Any]:  # fmt: skip
                nonlocal first
                values = reading(model, length, 1 if once else repeats, 0 if once else 1, kept)
                if first is None:
                    first = values["ms"]
                return values | ({} if model is next(iter(models.values())) else {"overhead": values["ms"] / first - 1})

            rows.measure(f"{name}: reading {length}", read)
        try:
            found = continuing(models, kept)
        except RuntimeError as error:
            torch.cuda.empty_cache()
            found = {name: {"error": str(error)} for name in models}
        times = [values.get("ms") for values in found.values()]
        for name, values in found.items():
            if values.get("ms") != times[0] and times[0]:
                values["overhead"] = values["ms"] / times[0] - 1
            rows.add(f"{name}: continuing after {length}", **values)
        print(f"  {time.perf_counter() - began:.1f} s", flush=True)
        for one in kept.values():
            with one.counting():
                one.state = None
    for model in models.values():
        model.captured_steps.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gla_1.3b,mamba2_1.3b,gated_delta_net_1.5b", help="[%(default)s]")
    parser.add_argument("--no-attention", action="store_true", help="without the Transformer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("gpu_retrieval", args.out)
    for name in args.models.split(","):
        config = published(name)
        measure(rows, {name: config, f"{name} with retrieval": with_retrieval(config)})
        torch.cuda.empty_cache()
    if not args.no_attention:
        measure(rows, {"transformer_1.5b": published("transformer_1.5b")})


if __name__ == "__main__":
    main()
