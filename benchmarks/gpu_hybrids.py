"""Hybrid models of published shape on one GPU, with random bf16 weights: ours beside transformers' own classes.

    python benchmarks/gpu_hybrids.py --out benchmarks/results/gpu_hybrids.json

The shapes are config.json files as published (tests/models/published/). transformers' model is made first; up to
`CHECKED` parameters it is saved and read by longrecall, and the logits of both are compared. Larger ones are made
twice. Times are medians of CUDA events, in one process: a prompt of 4,096 tokens, and one token of decoding at batch 1
and 64 after it. Ours as `generate()` does it (captured segments and step), and as a plain call; theirs a forward
pass with `use_cache`, `logits_to_keep=1`, with whatever kernels are installed (`fla` and `causal_conv1d` are noted).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import longrecall
from longrecall.inference.reading import captured_segments, captured_step, read_prompt
from longrecall.models.config import RecurrentConfig
from longrecall.models.formats import detect
from longrecall.models.recurrent_lm import RecurrentLM

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms

PUBLISHED = Path(__file__).parent.parent / "tests" / "models" / "published"
PROMPT, BATCHES, ROOM = 4096, (1, 64), 4096
CHECKED = 2_000_000_000
"""Parameters of a model that is written to disk and read again."""


def text_config(path: Path) -> dict[str, Any]:
    """A config.json as published; of a model that sees too, the part for text."""
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw.get("text_config", raw)


def theirs(raw: dict[str, Any]) -> Any:
    """transformers' model of this config on the GPU."""
    config = AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    finally:
        torch.set_default_dtype(before)


def ours(raw: dict[str, Any]) -> RecurrentLM:
    """A fresh model of the same config."""
    layout = detect(raw, "config.json").layout(raw, "config.json")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return RecurrentLM(RecurrentConfig.from_dict(layout.plain.to_dict())).eval()
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def of_theirs(rows: Rows, name: str, model: Any, ids: torch.Tensor) -> None:
    def prefill() -> Any:
        return model(ids, use_cache=True, logits_to_keep=1)

    rows.measure(f"{name}: transformers, prefill", lambda: {"ms": median_ms(prefill, repeats=3, warmup=2)})
    for batch in BATCHES:

        def decode(batch: int = batch) -> dict[str, Any]:
            out = model(ids[:, :512].expand(batch, -1), use_cache=True, logits_to_keep=1)
            token = ids[:, :1].expand(batch, -1)
            cache = out.past_key_values
            step: Callable[[], Any] = lambda: model(token, past_key_values=cache, use_cache=True)  # noqa: E731
            return {"ms": median_ms(step, repeats=8, warmup=3)}

        rows.measure(f"{name}: transformers, decoding, batch {batch}", decode)


@torch.inference_mode()
def of_ours(rows: Rows, name: str, model: RecurrentLM, ids: torch.Tensor) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())

    def captured() -> dict[str, Any]:
        segments = captured_segments(model, 1, PROMPT)
        segments.prepare(PROMPT)
        return {"ms": median_ms(lambda: read_prompt(model, segments, ids, None), repeats=10), "parameters": parameters}

    rows.measure(f"{name}: longrecall, prefill", captured)
    rows.measure(
        f"{name}: longrecall, prefill by a plain call",
        lambda: {"ms": median_ms(lambda: model(ids, use_cache=True, logits_to_keep=1), repeats=5)},
    )
    for batch in BATCHES:

        def decode(batch: int = batch) -> dict[str, Any]:
            step = captured_step(model, batch, ROOM)
            step.load(model(ids[:, :512].expand(batch, -1)).past_key_values)
            step.ids.random_(0, 1000)
            return {"ms": median_ms(step, repeats=50)}

        rows.measure(f"{name}: longrecall, decoding, batch {batch}", decode)


@torch.inference_mode()
def compared(rows: Rows, name: str, stock: Any, ids: torch.Tensor) -> RecurrentLM:
    """Save transformers' model, read it, and compare logits and greedy text."""
    with tempfile.TemporaryDirectory() as folder:
        stock.save_pretrained(folder)
        model = longrecall.load(folder, device="cuda")

    def logits() -> dict[str, Any]:
        found, expected = (m(ids[:, :512]).logits.float() for m in (model, stock))
        step = captured_step(model, 1, ROOM)
        step.load(model(ids[:, :511]).past_key_values)
        step.ids.copy_(ids[:, 511])
        return {
            "largest_logit": float(expected.abs().max()),
            "difference": float((found - expected).abs().max()),
            "difference_of_a_step": float((step().float() - expected[:, -1]).abs().max()),
            "same_choice": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        }

    rows.measure(f"{name}: logits of both, 512 tokens, bf16", logits)
    stock.float(), model.float()
    rows.measure(f"{name}: logits of both, 512 tokens, float32", logits)
    stock.bfloat16(), model.bfloat16()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--configs", nargs="*", default=["qwen3_5_0_8b", "nemotron_h_8b_base_8k"], help="names in PUBLISHED"
    )
    parser.add_argument("--only", choices=["ours", "theirs", "both"], default="both")
    args = parser.parse_args()
    rows = Rows("gpu_hybrids", args.out)
    rows.add("kernels of transformers", **{n: bool(importlib.util.find_spec(n)) for n in ("fla", "causal_conv1d")})
    for name in args.configs:
        raw = text_config(PUBLISHED / f"{name}.json")
        torch.manual_seed(0)
        ids = torch.randint(0, 1000, (1, PROMPT), device="cuda")
        model = None
        if args.only != "ours":
            stock = theirs(raw)
            if sum(parameter.numel() for parameter in stock.parameters()) <= CHECKED:
                model = compared(rows, name, stock, ids)
            of_theirs(rows, name, stock, ids)
            del stock
            torch.cuda.empty_cache()
        if args.only != "theirs":
            of_ours(rows, name, ours(raw) if model is None else model, ids)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
