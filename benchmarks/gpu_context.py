"""Context parallelism: one training step of a long sequence on one GPU, and cut over several; time and peak memory.

    torchrun --nproc-per-node 2 benchmarks/gpu_context.py --out benchmarks/results/gpu_context.json

bfloat16 weights, one row of random tokens, forward, loss and backward, medians of CUDA events. With several GPUs the
step ends with the sum of all gradients. The first GPU alone reads the whole sequence first. "memory of activations" is
the peak less the weights and their gradients. The errors compare the hidden states and gradients of a model of two
layers on random weights with those of the whole sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longrecall.context import ContextGroup, context_parallel
from longrecall.models.config import RecurrentConfig
from longrecall.models.description import read_description
from longrecall.models.recurrent_lm import RecurrentLM

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"


def built(config: RecurrentConfig, seed: int = 0) -> RecurrentLM:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return RecurrentLM(config).to(torch.bfloat16).train()


def measured(model: RecurrentLM, ids: torch.Tensor, group: ContextGroup | None, repeats: int) -> dict[str, Any]:
    """Median time of a step, and its peak memory on this GPU."""
    piece = ids if group is None else ids.chunk(group.world, dim=1)[group.rank]

    def work() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with contextlib.nullcontext() if group is None else context_parallel(group):
            model(input_ids=piece, labels=piece, use_cache=False, loss_only=True).loss.backward()
        if group is not None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            for sent in [dist.all_reduce(x, group=group.process_group, async_op=True) for x in gradients]:
                sent.wait()

    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak, fixed = torch.cuda.max_memory_allocated(), sum(p.nbytes for p in model.parameters()) * 2
    milliseconds = median_ms(work, repeats=repeats, warmup=1)
    return {
        "ms": milliseconds,
        "tokens_per_second": ids.numel() / milliseconds * 1e3,
        "peak_gib": peak / 2**30,
        "activations_gib": (peak - fixed) / 2**30,
    }


def errors(config: RecurrentConfig, group: ContextGroup, length: int) -> dict[str, float]:
    """Norms of errors over norms: hidden states and gradients of pieces against those of the whole sequence."""
    small = RecurrentConfig.from_dict({**config.to_dict(), "layers": config.to_dict()["layers"][:2]})
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (2, length), device="cuda", generator=generator)
    weights = torch.randn(2, length, config.hidden_size, device="cuda", generator=generator)
    found: dict[bool, dict[str, torch.Tensor]] = {}
    for cut in (False, True):
        model = built(small)
        mine, factor = (x.chunk(group.world, dim=1)[group.rank] if cut else x for x in (ids, weights))
        with context_parallel(group) if cut else contextlib.nullcontext():
            hidden = model.model(model.model.embeddings(mine), None, None, ids=mine)[0]
            (hidden.float() * factor).sum().backward()
        found[cut] = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        if cut:
            for gradient in found[cut].values():
                dist.all_reduce(gradient, group=group.process_group)
        found[cut]["hidden"] = hidden.float() if cut else hidden.float().chunk(group.world, dim=1)[group.rank]
    ratios = {name: float((found[True][name] - x).norm() / x.norm()) for name, x in found[False].items()}
    worst = max(ratios, key=lambda name: ratios[name] if name != "hidden" else 0.0)
    return {"hidden": ratios["hidden"], f"worst gradient, {worst}": ratios[worst]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gated_delta_net_400m", help="in recipes/configs [%(default)s]")
    parser.add_argument("--length", type=int, default=131072, help="tokens [%(default)s]")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps [%(default)s]")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = ContextGroup.of()
    config = read_description(CONFIGS / f"{args.model}.json")
    rows = Rows("gpu_context", args.out if group.first else None)
    worst = errors(config, group, 1024 * group.world)
    model = built(config)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, config.vocab_size, (1, args.length), device="cuda")
    dist.broadcast(ids, 0)
    name = f"{args.model}: 1 x {args.length}" + (", checkpointing" if args.checkpointing else "")
    whole: dict[str, Any] = {}
    if group.first:
        whole = measured(model, ids, None, args.repeats)
        rows.add(f"{name}, 1 GPU", **whole)
    dist.barrier()
    pieces = measured(model, ids, group, args.repeats)
    every: list[Any] = [None] * group.world
    dist.all_gather_object(every, pieces)
    if group.first:
        slowest = max(every, key=lambda found: found["ms"])
        most = max(found["activations_gib"] for found in every)
        compared = {
            "speedup": whole["ms"] / slowest["ms"],
            "share of the activations": most / whole["activations_gib"],
        }
        rows.add(f"{name}, {group.world} GPUs", **slowest, **compared, errors=worst, ranks=every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
