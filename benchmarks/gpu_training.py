"""One training step (forward, loss, backward) of published configurations on one GPU: time and peak memory.

    python benchmarks/gpu_training.py --out benchmarks/results/gpu_training.json

bfloat16 weights, batch 8 of 4096 random tokens, medians of CUDA events. Rows: the loss alone, launched kernel by kernel
and replayed as a CUDA graph (as `longrecall train` does); the first model's loss from whole logits too, and fla's Gated
DeltaNet of the same sizes beside it where it can be imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longrecall.layers.recording import record, recording_stream
from longrecall.models.description import read_description
from longrecall.models.recurrent_lm import RecurrentLM

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms, peak_gib

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"


def step(model: nn.Module, ids: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Median time and peak memory of forward, loss and backward."""

    def work() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(input_ids=ids, labels=ids, use_cache=False, **options).loss.backward()

    milliseconds = median_ms(work, repeats=15, warmup=3)
    return {"ms": milliseconds, "tokens_per_second": ids.numel() / milliseconds * 1e3, "peak_gib": peak_gib(work)}


def replayed(model: nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Median time of the same as a CUDA graph."""
    parameters = list(model.parameters())

    def work() -> None:
        model(input_ids=ids, labels=ids, use_cache=False, loss_only=True).loss.backward()

    stream = recording_stream(ids.device)
    with torch.cuda.stream(stream):
        work()
    for parameter in parameters:
        parameter.grad = None
    graph = record(work, 0, stream)
    milliseconds = median_ms(graph.replay, repeats=15, warmup=3)
    return {"ms": milliseconds, "tokens_per_second": ids.numel() / milliseconds * 1e3}


def peer(description: dict[str, Any]) -> nn.Module:
    """fla's Gated DeltaNet of the same sizes."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    mixer = description["layers"][0]["mixer"]
    config = GatedDeltaNetConfig(
        vocab_size=description["vocab_size"],
        hidden_size=description["hidden_size"],
        num_hidden_layers=len(description["layers"]),
        num_heads=mixer["num_heads"],
        head_dim=mixer["key_dim"],
        expand_v=1.0,
        intermediate_size=description["layers"][0]["mlp_size"],
        tie_word_embeddings=False,
        fuse_cross_entropy=True,
    )
    with torch.device("cuda"):
        return GatedDeltaNetForCausalLM(config).to(torch.bfloat16).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["gated_delta_net_400m", "gated_delta_net_400m_e8"]
    parser.add_argument("--model", nargs="+", default=models, help="in recipes/configs %(default)s")
    parser.add_argument("--rows", type=int, default=8, help="batch [%(default)s]")
    parser.add_argument("--length", type=int, default=4096, help="tokens [%(default)s]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("gpu_training", args.out)
    for name in args.model:
        config = read_description(CONFIGS / f"{name}.json")
        ids = torch.randint(0, config.vocab_size, (args.rows, args.length), device="cuda")

        def ours(config: Any = config) -> nn.Module:
            with torch.device("cuda"):
                return RecurrentLM(config).to(torch.bfloat16).train()

        def measure(label: str, work: Callable[[], dict[str, Any]], name: str = name) -> None:
            rows.measure(f"{name}: step, {label}", work)
            torch.cuda.empty_cache()

        measure("loss alone", lambda ids=ids, ours=ours: step(ours(), ids, loss_only=True))
        measure("loss alone, CUDA graph", lambda ids=ids, ours=ours: replayed(ours(), ids))
        if name == args.model[0]:
            measure("whole logits", lambda ids=ids, ours=ours: step(ours(), ids))
            measure("fla", lambda ids=ids, config=config: step(peer(config.to_dict()), ids))


if __name__ == "__main__":
    main()
