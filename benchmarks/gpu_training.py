"""One training step (forward, loss, backward) of a published configuration on one GPU: time and peak memory.

    python benchmarks/gpu_training.py --out benchmarks/results/gpu_training.json

bfloat16 weights, batch 8 of 4096 random tokens, medians of CUDA events. Rows: the loss from whole logits, and the loss
alone (Liger-Kernel where installed, else logits in one piece at the labelled positions). fla's Gated DeltaNet of the
same sizes is timed beside it where it can be imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

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

    milliseconds = median_ms(work, repeats=5, warmup=2)
    return {"ms": milliseconds, "tokens_per_second": ids.numel() / milliseconds * 1e3, "peak_gib": peak_gib(work)}


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
    parser.add_argument("--model", default="gated_delta_net_400m", help="in recipes/configs [%(default)s]")
    parser.add_argument("--rows", type=int, default=8, help="batch [%(default)s]")
    parser.add_argument("--length", type=int, default=4096, help="tokens [%(default)s]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("gpu_training", args.out)
    config = read_description(CONFIGS / f"{args.model}.json")
    ids = torch.randint(0, config.vocab_size, (args.rows, args.length), device="cuda")

    def ours(**options: Any) -> dict[str, Any]:
        with torch.device("cuda"):
            model = RecurrentLM(config).to(torch.bfloat16).train()
        return step(model, ids, **options)

    rows.measure(f"{args.model}: step, loss alone", lambda: ours(loss_only=True))
    torch.cuda.empty_cache()
    rows.measure(f"{args.model}: step, whole logits", ours)
    torch.cuda.empty_cache()
    rows.measure(f"{args.model}: step, fla", lambda: step(peer(config.to_dict()), ids))


if __name__ == "__main__":
    main()
