"""Recall length by state size: small models from scratch whose states differ by the factor of their expansion.

`--study trend` trains Gated DeltaNet and GLA with head-wise expansion by 1, 2, 4 and 8, and a Transformer, with several
seeds (figure 2 of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios"). `--study ablation` trains Gated
DeltaNet at factor 4 in every other form of expansion (its tables 7 and 8). All models read the same bytes, side by
side. Then the share of needles recalled whole is measured at growing lengths, which gives the maximum recall lengths.
Usage: python experiments/state_recall.py --study trend --corpus BOOKS --validation OTHER_BOOKS --out FILE.json
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import Plan, Run
from from_scratch import budgeted, build, memory, moved, provenance, start, tokens_of
from measure import answers_right, bits_per_byte
from mixture import Books
from needle_rows import KINDS, LINE, WIDTHS, Mixture, Rows, needle_exam, prose_exam
from torch import Tensor

from longrecall.evaluation.recall_search import THRESHOLDS, maximum_lengths

FACTORS = (1, 2, 4, 8)
ABLATION_FACTOR = 4
FORMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "headwise": {"kind": "headwise"},
    "naive": {"kind": "naive"},
    "heads": {"kind": "heads"},
    "low_rank": {"kind": "low_rank"},
    "dpfp": {"kind": "dpfp"},
    "lfm": {"kind": "lfm"},
    "whole": {"kind": "headwise", "subheads": False},
    "relu": {"kind": "headwise", "activation": "relu"},
    "1+elu": {"kind": "headwise", "activation": "1+elu"},
    "identity": {"kind": "headwise", "activation": "identity"},
}
"""Ablation -> expansion, without its factor."""
QUERIES_A_ROW = 8
ROWS_AT_ONCE = 2**17
"""Tokens of one forward pass while measuring, about."""


def recurrent(mixer: str, expansion: dict[str, Any] | None, args: argparse.Namespace) -> dict[str, Any]:
    """A model of `mixer` layers, each with a SwiGLU MLP."""
    sizes = {"num_heads": args.heads, "key_dim": args.head_dim, "value_dim": args.head_dim, "conv_width": 4}
    described = {"type": mixer, **sizes} | ({"expansion": expansion} if expansion else {})
    return {"hidden_size": args.width, "layers": [{"mixer": described, "mlp_size": args.mlp}] * args.layers}


def transformer(args: argparse.Namespace) -> dict[str, Any]:
    """One layer more, as attention has fewer parameters (the paper's Transformer++ has more layers too).

    Twice the heads of half the width: it has no convolution, so finding a key of two letters takes heads of their own.
    """
    described = {"type": "attention", "num_heads": 2 * args.heads, "head_dim": args.head_dim // 2}
    return {"hidden_size": args.width, "layers": [{"mixer": described, "mlp_size": args.mlp}] * (args.layers + 1)}


def described_models(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> what the model is; names are ``mixer:factor`` in the trend, ``form`` in the ablation."""
    if args.study == "ablation":
        forms = {form: how and {**how, "factor": ABLATION_FACTOR} for form, how in FORMS.items()}
        return {form: recurrent("gated_delta_net", how, args) for form, how in forms.items()}
    models = {}
    for mixer in ("gated_delta_net", "gla"):
        for factor in args.factors:
            how = {"kind": "headwise", "factor": factor} if factor > 1 else None
            models[f"{mixer}:{factor}"] = recurrent(mixer, how, args)
    return models | {"transformer": transformer(args)}


def counted(right: Tensor, rows: int, asked: int, width: int) -> dict[str, int]:
    """Whole values and single characters right; `right`: bool per labelled character, row by row."""
    values = right.view(rows, asked, width)
    whole = int(values.all(-1).sum())
    return {"right": whole, "asked": rows * asked, "characters_right": int(values.sum()), "characters": values.numel()}


def added(parts: list[dict[str, int]]) -> dict[str, int]:
    """Counts of several parts, summed."""
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def examined(model: Any, make: Any, rows: int, tokens: int, asked: int, width: int) -> dict[str, int]:
    """`rows` test rows of about `tokens` tokens, made and read in parts; `make`: rows -> ids and labels."""
    most = max(1, ROWS_AT_ONCE // tokens)
    parts = []
    for begin in range(0, rows, most):
        count = min(most, rows - begin)
        made: Rows = make(count)
        parts.append(counted(answers_right(model, *made), count, asked, width))
    return added(parts)


def needle_point(model: Any, kind: str, length: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Recall among as many needles as fit into `length` bytes."""
    count = length // (LINE + WIDTHS[kind])
    asked = min(count, QUERIES_A_ROW)
    g = np.random.Generator(np.random.PCG64([29, seed, length, KINDS.index(kind)]))
    make = functools.partial(needle_exam, g, count=count, asked=asked, kind=kind)
    tokens = (count + asked) * (LINE + WIDTHS[kind])
    found = examined(model, make, -(-args.queries // asked), tokens, asked, WIDTHS[kind])
    return {"length": length, "needles": count, **found}


def prose_point(
    model: Any, kind: str, length: int, held_out: np.ndarray, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Recall of one needle in `length` bytes of unseen prose."""
    g = np.random.Generator(np.random.PCG64([31, seed, length, KINDS.index(kind)]))
    make = functools.partial(prose_exam, g, held_out, length=length, kind=kind)
    found = examined(model, make, args.prose_rows, length, 1, WIDTHS[kind])
    return {"length": length, "needles": 1, **found}


def recall_length(points: list[dict[str, Any]], right: str = "right", asked: str = "asked") -> dict[str, int]:
    """Threshold -> longest length such that it and all shorter ones are above it; 0 where none is."""
    shares = [{"length": point["length"], "value": point[right] / point[asked]} for point in points]
    return {threshold: length or 0 for threshold, length in maximum_lengths(shares).items()}


def lengths_of(kind: str, step: int, longest: int) -> list[int]:
    """Multiples of `step` up to `longest` that hold a needle."""
    return [length for length in range(step, longest + 1, step) if length >= LINE + WIDTHS[kind]]


def measured(model: Any, held_out: np.ndarray, books: Books, args: argparse.Namespace) -> dict[str, Any]:
    """Recall by length in both haystacks, the recall lengths, and bits per byte of unseen books."""
    points: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        lengths = lengths_of(kind, args.step, args.longest)
        points[f"needles:{kind}"] = [needle_point(model, kind, length, args, 0) for length in lengths]
        lengths = lengths_of(kind, args.prose_step, args.prose_longest)
        points[f"prose:{kind}"] = [prose_point(model, kind, length, held_out, args, 0) for length in lengths]
    ((bits, error),) = bits_per_byte(model, books, [0, args.length], args.text_rows, 0)
    longest = {name: recall_length(found) for name, found in points.items()}
    single = {name: recall_length(found, "characters_right", "characters") for name, found in points.items()}
    lengths = {"recall_length": longest, "character_recall_length": single}
    return {**lengths, "bits_per_byte": [bits, error], "points": points}


class Losses:
    """Losses of all runs, kept on the device until the end."""

    def __init__(self, runs: list[Run], every: int) -> None:
        self.runs, self.every = runs, every
        self.kept: dict[str, list[tuple[int, Tensor]]] = {run.plan.name: [] for run in runs}

    def __call__(self, step: int) -> None:
        """After a step is enqueued: copy every loss on its own stream."""
        if step % self.every:
            return
        for run in self.runs:
            with run.captured.on_stream():
                self.kept[run.plan.name].append((step, run.loss.clone()))

    def of(self, run: Run) -> list[list[float]]:
        """[step, loss] of one run."""
        return [[step, round(float(loss), 4)] for step, loss in self.kept[run.plan.name]]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--tiny` shrinks everything to seconds on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=("trend", "ablation"), required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="sizes for a test: nothing is learned")
    parser.add_argument("--steps", type=int, default=8000, help="at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="of training; as many steps as fit")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after the start when training ends")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds of one study may be runs of their own")
    parser.add_argument("--factors", type=int, nargs="+", default=FACTORS)
    parser.add_argument("--only", nargs="+", help="train these models alone")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--rates", type=float, nargs="+", help="one for each seed, to look for a good one")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs=3, default=(1, 7, 2), help="books, needles, needles in books")
    parser.add_argument("--early", type=float, default=0.3, help="share of steps with short values, few needles")
    parser.add_argument("--ramp", type=float, default=0.75, help="share after which all sizes are whole")
    parser.add_argument("--hold", type=float, default=0.5, help="share of the steps before the rates begin to fall")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=320)
    parser.add_argument("--step", type=int, default=64, help="bytes from one length of needles to the next")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--queries", type=int, default=512, help="at each length of needles")
    parser.add_argument("--prose-step", type=int, default=512, help="the paper's")
    parser.add_argument("--prose-longest", type=int, default=2048)
    parser.add_argument("--prose-rows", type=int, default=64, help="at each length of prose")
    parser.add_argument("--text-rows", type=int, default=64, help="excerpts for bits per byte")
    parser.add_argument("--corpus-bytes", type=int, default=24_000_000)
    args = parser.parse_args(given)
    if args.tiny:
        small = {"steps": 3, "factors": (1, 2), "length": 96, "rows": (1, 2, 1), "width": 16, "heads": 2}
        small |= {"head_dim": 8, "layers": 1, "mlp": 16, "step": 48, "longest": 96, "queries": 4, "prose_step": 64}
        small |= {"prose_longest": 128, "prose_rows": 2, "text_rows": 2, "corpus_bytes": 20_000}
        vars(args).update(small)
    if args.rates and len(args.rates) != args.seeds:
        parser.error("--rates needs one rate for each seed")
    return args


def begun(args: argparse.Namespace, device: str) -> list[Run]:
    """Every model of the study with every seed, ready to train."""
    descriptions = described_models(args)
    makes, plans = {}, {}
    for index in range(args.seeds):
        seed, rate = args.first_seed + index, args.rates[index] if args.rates else args.learning_rate
        for name, description in descriptions.items():
            if args.only and name not in args.only:
                continue
            key = f"{name}/{seed}"
            makes[key] = functools.partial(build, description, args.length, seed, device)
            plans[key] = Plan(key, rate, warmup=100, hold=args.hold, seed=seed)
    ids = torch.zeros(sum(args.rows), args.length, dtype=torch.long, device=device)
    return start(makes, plans, ids, ids.clone())


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.time()
    record: dict[str, Any] = provenance(vars(args)) | {"thresholds": THRESHOLDS, "results": []}
    text = tokens_of(args.corpus, args.corpus_bytes)
    data = Mixture(0, args.steps, args.length, *args.rows, text, args.early, args.ramp)
    held_out, books = tokens_of(args.validation, args.corpus_bytes), Books(args.validation, device)
    runs = begun(args, device)

    def next_batch(step: int) -> tuple[Tensor, Tensor]:
        data.steps = max(runs[0].steps, step + 1)
        return moved(data.batch(step), device)

    losses = Losses(runs, max(1, args.steps // 40))
    print(f"{len(runs)} models ready after {time.time() - began:.0f} s", flush=True)
    seconds = min(args.seconds, args.until - (time.time() - began))
    record["training"] = budgeted(runs, args.steps, seconds, next_batch, losses) | {"memory_gib": memory()}
    tokens = record["training"]["steps"] * sum(args.rows) * args.length
    print(f"trained on {tokens / 1e6:.1f}M bytes each after {time.time() - began:.0f} s", flush=True)
    for run in runs:
        # Recordings hold the activations of a whole training step.
        run.captured.release()
    for run in runs:
        name, seed = run.plan.name.split("/")
        row = {"model": name, "seed": int(seed), "learning_rate": run.plan.learning_rate, "bytes": tokens}
        row |= {"state_size": run.model.state_size(), "parameters": run.model.num_parameters()}
        row["losses"] = losses.of(run)
        clock = time.time()
        row |= measured(run.model.eval(), held_out, books, args)
        row["measuring_seconds"] = round(time.time() - clock, 2)
        record["results"].append(row)
        args.out.write_text(json.dumps(record))
        shown = {key: row[key] for key in ("state_size", "parameters", "recall_length", "measuring_seconds")}
        print(f"{run.plan.name}: loss {row['losses'][-1][1]}, {json.dumps(shown)}", flush=True)
    print(f"done after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
