"""Recall length by state size: small models from scratch whose states differ by the factor of their expansion.

`--study trend` trains Gated DeltaNet and GLA with head-wise expansion by 1, 2, 4 and 8, and a Transformer, with several
seeds (figure 2 of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios"); with `--equal` also models of
the smaller factors with as many parameters as the largest has. `--study ablation` trains Gated DeltaNet at factor 4 in
every other form of expansion (its tables 7 and 8). All models read the same bytes, side by side. Then the share of
needles recalled whole is measured at growing lengths, which gives the maximum recall lengths. `waves.py` runs a study
seed by seed.
Usage: python -m experiments.state_recall.experiment --study trend \\
           --corpus BOOKS --validation OTHER_BOOKS --out FILE.json
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common.command import add_budget, provenance, training_parser
from experiments.common.engine import Plan, Run
from experiments.common.from_scratch import FreshRun, moved, start, tokens_of, trained
from experiments.common.measure import answers_right, bits_per_byte
from experiments.common.mixture import Books
from experiments.common.models import build
from experiments.state_recall.arms import arm_name, equal_widths, parts_of
from experiments.state_recall.needle_rows import KINDS, LINE, WIDTHS, Mixture, Rows, needle_exam, prose_exam
from longrecall.evaluation.recall_search import THRESHOLDS, maximum_lengths
from longrecall.models.accounting import account
from longrecall.models.config import RecurrentConfig

FACTORS = (1, 2, 4, 8)
RATES = (("gla", 3e-3), ("transformer", 1e-3))
"""Peak learning rates of mixers that have another than the rest."""
CUTS = ((0.15, 8), (0.35, 4), (0.65, 2))
"""Shorter rows at first: (share of the steps, rows that take the place of one)."""
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
AT_ONCE = 2**19
"""Tokens of one forward pass while measuring, about."""
LOSS_EVERY = 50
"""Steps from one recorded loss to the next."""


def described_model(
    mixer: dict[str, Any], layers: int, args: argparse.Namespace, mlp: int | None = None
) -> dict[str, Any]:
    """A model of `layers` layers, each `mixer` and a SwiGLU MLP; `mlp`: its inner width where it is another."""
    layer = {"mixer": mixer, "mlp_size": args.mlp if mlp is None else mlp}
    return {"hidden_size": args.width, "layers": [layer] * layers, "initializer_range": args.init}


def recurrent(
    mixer: str, expansion: dict[str, Any] | None, args: argparse.Namespace, mlp: int | None = None
) -> dict[str, Any]:
    """A model of `mixer` layers, each with a SwiGLU MLP."""
    sizes = {"num_heads": args.heads, "key_dim": args.head_dim, "value_dim": args.head_dim, "conv_width": 4}
    described = {"type": mixer, **sizes} | ({"expansion": expansion} if expansion else {})
    return described_model(described, args.layers, args, mlp)


def transformer(args: argparse.Namespace) -> dict[str, Any]:
    """One layer more, as attention has fewer parameters (the paper's Transformer++ has more layers too).

    Four heads as wide as the model together: it has no convolution, so finding a key of two letters takes heads of
    their own.
    """
    described = {"type": "attention", "num_heads": 4, "head_dim": args.width // 4}
    return described_model(described, args.layers + 1, args)


def described_models(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> what the model is; names are those of `arms` in the trend, ``form`` in the ablation."""
    if args.study == "ablation":
        forms = {form: how and {**how, "factor": args.ablation_factor} for form, how in FORMS.items()}
        return {form: recurrent("gated_delta_net", how, args) for form, how in forms.items()}
    models = {}
    for mixer in ("gated_delta_net", "gla"):

        def of_factor(factor: int, mlp: int | None = None, mixer: str = mixer) -> dict[str, Any]:
            how = {"kind": "headwise", "factor": factor} if factor > 1 else None
            return recurrent(mixer, how, args, mlp)

        def parameters(factor: int, mlp: int, of_factor: Any = of_factor) -> int:
            return account(RecurrentConfig(**of_factor(factor, mlp))).parameters

        models |= {arm_name(mixer, factor): of_factor(factor) for factor in args.factors}
        if args.equal:
            widths = equal_widths(args.factors, parameters, args.mlp)
            smaller = [factor for factor in args.factors if factor != max(args.factors)]
            models |= {arm_name(mixer, factor, True): of_factor(factor, widths[factor]) for factor in smaller}
    return models | {"transformer": transformer(args)}


def counted(right: Tensor, rows: int, asked: int, width: int) -> dict[str, int]:
    """Whole values and single characters right; `right`: bool per labelled character, row by row."""
    values = right.view(rows, asked, width)
    whole = int(values.all(-1).sum())
    return {"right": whole, "asked": rows * asked, "characters_right": int(values.sum()), "characters": values.numel()}


def added(parts: list[dict[str, int]]) -> dict[str, int]:
    """Counts of several parts, summed."""
    return {key: sum(part[key] for part in parts) for key in parts[0]}


@dataclass(frozen=True)
class Exam:
    """Test rows of one length, the same for every model, in parts that are read at once."""

    length: int
    needles: int
    """Of a row."""
    asked: int
    """Questions of a row."""
    width: int
    """Characters of a value."""
    parts: list[Rows]

    def taken(self, model: Any) -> dict[str, Any]:
        """What `model` recalls of it."""
        found = [counted(answers_right(model, *part), len(part[0]), self.asked, self.width) for part in self.parts]
        return {"length": self.length, "needles": self.needles, **added(found)}


def in_parts(make: Callable[[int], Rows], rows: int, tokens: int) -> list[Rows]:
    """`rows` rows of about `tokens` tokens; `make`: a number of rows -> ids and labels."""
    most = max(1, AT_ONCE // tokens)
    return [make(min(most, rows - begin)) for begin in range(0, rows, most)]


def exam_of_needles(kind: str, length: int, args: argparse.Namespace, seed: int) -> Exam:
    """As many needles as fit into `length` bytes."""
    width = WIDTHS[kind]
    count = length // (LINE + width)
    asked = min(count, QUERIES_A_ROW)
    g = np.random.Generator(np.random.PCG64([29, seed, length, KINDS.index(kind)]))
    make = functools.partial(needle_exam, g, count=count, asked=asked, kind=kind)
    parts = in_parts(make, -(-args.queries // asked), (count + asked) * (LINE + width))
    return Exam(length, count, asked, width, parts)


def exam_in_prose(kind: str, length: int, held_out: np.ndarray, args: argparse.Namespace, seed: int) -> Exam:
    """One needle in `length` bytes of unseen prose."""
    g = np.random.Generator(np.random.PCG64([31, seed, length, KINDS.index(kind)]))
    make = functools.partial(prose_exam, g, held_out, length=length, kind=kind)
    return Exam(length, 1, 1, WIDTHS[kind], in_parts(make, args.prose_rows, length))


def recall_length(points: list[dict[str, Any]], right: str = "right", asked: str = "asked") -> dict[str, int]:
    """Threshold -> longest length such that it and all shorter ones are above it; 0 where none is."""
    shares = [{"length": point["length"], "value": point[right] / point[asked]} for point in points]
    return {threshold: length or 0 for threshold, length in maximum_lengths(shares).items()}


def lengths_of(kind: str, step: int, longest: int) -> list[int]:
    """Multiples of `step` up to `longest` that hold a needle."""
    return [length for length in range(step, longest + 1, step) if length >= LINE + WIDTHS[kind]]


def all_exams(held_out: np.ndarray, args: argparse.Namespace) -> dict[str, list[Exam]]:
    """``haystack:kind`` -> its exams by length."""
    exams: dict[str, list[Exam]] = {}
    for kind, step in zip(KINDS, args.step, strict=True):
        lengths = lengths_of(kind, step, args.longest)
        exams[f"needles:{kind}"] = [exam_of_needles(kind, length, args, 0) for length in lengths]
        lengths = lengths_of(kind, args.prose_step, args.prose_longest)
        exams[f"prose:{kind}"] = [exam_in_prose(kind, length, held_out, args, 0) for length in lengths]
    return exams


def measured(model: Any, exams: dict[str, list[Exam]], books: Books, args: argparse.Namespace) -> dict[str, Any]:
    """Recall by length in both haystacks, the recall lengths, and bits per byte of unseen books."""
    points = {name: [exam.taken(model) for exam in by_length] for name, by_length in exams.items()}
    ((bits, error),) = bits_per_byte(model, books, [0, args.length], args.text_rows, 0)
    longest = {name: recall_length(found) for name, found in points.items()}
    single = {name: recall_length(found, "characters_right", "characters") for name, found in points.items()}
    lengths = {"recall_length": longest, "character_recall_length": single}
    return {**lengths, "bits_per_byte": [bits, error], "points": points}


class Losses:
    """Losses of all runs, kept on the device until the end."""

    def __init__(self, runs: Sequence[Run], every: int) -> None:
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


def cut(given: str) -> tuple[float, int]:
    """``SHARE:PIECES``, one of the cuts of a `Mixture`."""
    share, pieces = given.split(":")
    return float(share), int(pieces)


def family_rate(given: str) -> tuple[str, float]:
    """``MIXER:RATE``, the peak learning rate of one mixer."""
    mixer, rate = given.split(":")
    return mixer, float(rate)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--tiny` shrinks everything to seconds on a CPU."""
    parser = training_parser(__doc__)
    add_budget(parser, steps=20000)
    parser.add_argument("--study", choices=("trend", "ablation"), required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds of one study may be runs of their own")
    parser.add_argument("--factors", type=int, nargs="+", default=FACTORS)
    parser.add_argument("--equal", action="store_true", help="also models with the parameters of the largest factor")
    parser.add_argument("--ablation-factor", type=int, default=ABLATION_FACTOR)
    parser.add_argument("--only", nargs="+", help="train these models alone")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rates", type=family_rate, nargs="*", default=RATES, help="MIXER:RATE, where it is another")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs=3, default=(1, 6, 2), help="books, needles, needles in books")
    parser.add_argument("--cuts", type=cut, nargs="*", default=CUTS, help="SHARE:PIECES, shorter rows until that share")
    parser.add_argument("--early", type=float, default=0.04, help="share of steps with short values, few needles")
    parser.add_argument("--ramp", type=float, default=0.25, help="share after which all sizes are whole")
    parser.add_argument("--least", type=int, default=1, help="needles of a row of needles")
    parser.add_argument("--hold", type=float, default=0.5, help="share of the steps before the rates begin to fall")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=320)
    parser.add_argument("--init", type=float, default=0.02, help="standard deviation of projections at first")
    parser.add_argument("--step", type=int, nargs=2, default=(32, 64), help="bytes to the next length; of UUIDs")
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
        small |= {
            "head_dim": 8,
            "layers": 1,
            "mlp": 16,
            "step": (48, 48),
            "longest": 96,
            "queries": 4,
            "prose_step": 64,
        }
        small |= {"prose_longest": 128, "prose_rows": 2, "text_rows": 2, "corpus_bytes": 20_000, "cuts": ((0.5, 2),)}
        vars(args).update(small)
    return args


def begun(args: argparse.Namespace, device: str) -> list[FreshRun]:
    """Every model of the study with every seed, ready to train."""
    descriptions = described_models(args)
    makes, plans = {}, {}
    for index in range(args.seeds):
        seed = args.first_seed + index
        for name, description in descriptions.items():
            if args.only and name not in args.only:
                continue
            key, rate = f"{name}/{seed}", dict(args.rates).get(parts_of(name)[0], args.learning_rate)
            makes[key] = functools.partial(build, description, args.length, seed, device)
            plans[key] = Plan(key, rate, warmup=100, hold=args.hold, seed=seed)
    ids = torch.zeros(sum(args.rows), args.length, dtype=torch.long, device=device)
    return start(makes, plans, ids, ids.clone(), sorted({pieces for _, pieces in args.cuts}))


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.time()
    record: dict[str, Any] = provenance(vars(args)) | {"thresholds": THRESHOLDS, "results": []}
    text = tokens_of(args.corpus, args.corpus_bytes)
    data = Mixture(
        0, args.steps, args.length, *args.rows, text, args.early, args.ramp, least=args.least, cuts=tuple(args.cuts)
    )
    held_out, books = tokens_of(args.validation, args.corpus_bytes), Books(args.validation, device)
    runs = begun(args, device)

    def next_batch(step: int) -> tuple[Tensor, Tensor]:
        data.steps = max(runs[0].steps, step + 1)
        for run in runs:
            run.pieces = data.pieces(step)
        ids, labels = moved(data.batch(step), device)
        return ids.view_as(runs[0].ids), labels.view_as(runs[0].labels)

    losses = Losses(runs, min(LOSS_EVERY, max(1, args.steps // 40)))
    record["training"] = trained(runs, args, began, next_batch, losses)
    exams = all_exams(held_out, args)
    for run in runs:
        name, seed = run.plan.name.split("/")
        row = {
            "model": name,
            "seed": int(seed),
            "learning_rate": run.plan.learning_rate,
            "bytes": record["training"]["bytes"],
        }
        row |= {"state_size": run.model.state_size(), "parameters": run.model.num_parameters()}
        row["losses"] = losses.of(run)
        clock = time.time()
        row |= measured(run.model.eval(), exams, books, args)
        row["measuring_seconds"] = round(time.time() - clock, 2)
        record["results"].append(row)
        args.out.write_text(json.dumps(record))
        shown = {key: row[key] for key in ("state_size", "parameters", "recall_length", "measuring_seconds")}
        print(f"{run.plan.name}: loss {row['losses'][-1][1]}, {json.dumps(shown)}", flush=True)
    print(f"done after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
