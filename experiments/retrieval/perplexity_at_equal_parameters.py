"""Bits per byte with and without a retrieval layer at equal parameters: small models from scratch on books.

The question of RESONA's table 2. Each mixer is trained in four arms over the same batches: `plain`; `weighted` and
`hard`, the same model with one retrieval layer whose selector is trained or frozen; `wide`, the plain model with wider
MLPs, as many parameters as `weighted`. All models read the same unseen excerpts, so that differences are paired.
Usage: python -m experiments.retrieval.perplexity_at_equal_parameters \\
           --corpus BOOKS --validation OTHER_BOOKS --out FILE.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.common.command import add_budget, provenance, training_parser
from experiments.common.engine import Plan, Run
from experiments.common.from_scratch import FreshRun, crops, moved, start, tokens_of, trained
from experiments.common.models import build
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

MIXERS = ("gla", "gated_delta_net", "mamba2")
ARMS = ("plain", "weighted", "hard", "wide")
AGAINST = ("plain", "wide")
"""Arms that the others are compared with."""
ROWS_AT_ONCE = 32


def mixer_of(name: str, width: int, head: int) -> dict[str, Any]:
    """A mixer of the published proportions: GLA's keys half as wide as its values, Mamba-2 twice the width inside."""
    if name == "gla":
        return {"type": "gla", "num_heads": width // (2 * head), "key_dim": head, "value_dim": 2 * head}
    if name == "gated_delta_net":
        return {"type": name, "num_heads": width // head, "key_dim": head, "value_dim": head, "conv_width": 4}
    return {"type": "mamba2", "inner_dim": 2 * width, "head_dim": head, "state_dim": head}


def description(name: str, arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the model of a mixer and an arm is."""
    mixer = mixer_of(name, args.width, args.head)
    layers = [{"mixer": mixer, "mlp_size": args.mlp} for _ in range(args.layers)]
    if arm in ("weighted", "hard"):
        retrieval = {"type": "retrieval", "base": mixer, "chunk": args.chunk, "top_k": args.top_k, "selector": arm}
        retrieval |= {"num_heads": args.retrieval_heads, "head_dim": args.head, "encoder_dim": args.head}
        layers[args.layers // 2]["mixer"] = retrieval
    if arm == "wide":
        missing = parameters(description(name, "weighted", args)) - parameters(description(name, "plain", args))
        # A SwiGLU MLP has three matrices: one more inner channel costs three rows of `width`.
        channels = round(missing / (3 * args.width))
        for index, layer in enumerate(layers):
            layer["mlp_size"] += channels // args.layers + (index < channels % args.layers)
    return {"hidden_size": args.width, "layers": layers}


def parameters(described: dict[str, Any]) -> int:
    """Parameters of a described model, without building it."""
    shapes = RecurrentConfig(**described).tensor_shapes()
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "lm_head.weight")


@torch.no_grad()
def bits(model: RecurrentLM, text: Tensor, edges: list[int]) -> np.ndarray:
    """Bits per byte of excerpts `text` ``[N, edges[-1] + 1]`` at positions [edges[i], edges[i+1]): ``[N, ranges]``."""
    found = []
    for part in text.split(ROWS_AT_ONCE):
        with torch.autocast(part.device.type, dtype=torch.bfloat16, enabled=part.is_cuda):
            logits = model(part[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        losses = losses.view(len(part), -1) / math.log(2)
        found.append(torch.stack([losses[:, a:b].mean(1) for a, b in itertools.pairwise(edges)], 1))
    return torch.cat(found).double().cpu().numpy()


def weights_of(edges: list[int]) -> np.ndarray:
    """Share of the positions in each range."""
    return np.diff(edges) / (edges[-1] - edges[0])


def mean_and_error(values: np.ndarray) -> list[float]:
    """Mean over excerpts ``[N]`` and its standard error."""
    return [float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))]


def summary(found: np.ndarray, edges: list[int]) -> dict[str, Any]:
    """Means and standard errors of ``[N, ranges]``: over all positions, and for each range."""
    return {
        "all": mean_and_error(found @ weights_of(edges)),
        "ranges": [mean_and_error(column) for column in found.T],
    }


def compared(found: dict[str, np.ndarray], edges: list[int]) -> dict[str, dict[str, Any]]:
    """Paired differences of the arms of one mixer and seed, ``arm - other``: negative where `arm` is better."""
    pairs = [(arm, other) for other in AGAINST for arm in found if arm != other and other in found]
    return {f"{arm} - {other}": summary(found[arm] - found[other], edges) for arm, other in pairs}


def edges_of(length: int) -> list[int]:
    """0, then doublings that end in `length`: an eighth, a quarter, a half of it, and all."""
    return [0, length // 8, length // 4, length // 2, length]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--tiny` shrinks everything to seconds on a CPU."""
    parser = training_parser(__doc__)
    add_budget(parser, steps=4000)
    parser.add_argument("--mixers", nargs="+", default=MIXERS)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mlp", type=int, default=704)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--retrieval-heads", type=int, default=8)
    parser.add_argument("--excerpts", type=int, default=512, help="of unseen books")
    parser.add_argument("--corpus-bytes", type=int, default=64_000_000)
    args = parser.parse_args(given)
    if args.tiny:
        small = {"steps": 2, "length": 64, "rows": 2, "width": 32, "head": 8, "layers": 2, "mlp": 32, "chunk": 8}
        vars(args).update(small | {"top_k": 2, "retrieval_heads": 2, "excerpts": 3, "corpus_bytes": 20_000})
    return args


def begun(args: argparse.Namespace, device: str) -> list[FreshRun]:
    """Every mixer in every arm with every seed, ready to train."""
    makes, plans = {}, {}
    for seed, name, arm in itertools.product(range(args.seeds), args.mixers, args.arms):
        key = f"{name}/{arm}/{seed}"
        makes[key] = functools.partial(build, description(name, arm, args), args.length, seed, device)
        plans[key] = Plan(key, args.learning_rate, warmup=100, seed=seed)
    ids = torch.zeros(args.rows, args.length, dtype=torch.long, device=device)
    return start(makes, plans, ids, ids.clone())


def row_of(run: Run, found: np.ndarray, edges: list[int]) -> dict[str, Any]:
    """What is recorded of one model."""
    name, arm, seed = run.plan.name.split("/")
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    return {
        "mixer": name,
        "arm": arm,
        "seed": int(seed),
        "parameters": run.model.num_parameters(),
        "trained_parameters": trained,
        "last_loss": float(run.loss),
        "bits_per_byte": summary(found, edges),
    }


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.time()
    edges = edges_of(args.length)
    record: dict[str, Any] = provenance(vars(args)) | {"edges": edges, "results": [], "differences": []}
    corpus, held_out = (tokens_of(path, args.corpus_bytes) for path in (args.corpus, args.validation))
    runs = begun(args, device)

    def next_batch(step: int) -> tuple[Tensor, Tensor]:
        g = np.random.Generator(np.random.PCG64([37, step]))
        rows = crops(corpus, g, args.rows, args.length)
        return moved((rows, rows), device)

    record["training"] = trained(runs, args, began, next_batch)
    excerpts = crops(held_out, np.random.Generator(np.random.PCG64(41)), args.excerpts, args.length + 1)
    text = torch.from_numpy(excerpts).to(device)
    found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for run in runs:
        measured = bits(run.model.eval(), text, edges)
        row = row_of(run, measured, edges)
        record["results"].append(row)
        found.setdefault((row["mixer"], row["seed"]), {})[row["arm"]] = measured
        shown = {key: row[key] for key in ("parameters", "last_loss", "bits_per_byte")}
        print(f"{run.plan.name}: {json.dumps(shown)}", flush=True)
    for (name, seed), arms in found.items():
        pairs = compared(arms, edges)
        record["differences"].append({"mixer": name, "seed": seed, "pairs": pairs})
        print(f"{name}/{seed}: {json.dumps({pair: both['all'] for pair, both in pairs.items()})}", flush=True)
        args.out.write_text(json.dumps(record))
    print(f"done after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
