"""Length generalization: pretrain at 512 tokens until a model falls ill beyond them, then try every intervention.

Small Mamba-2 and GLA models learn books, recall, copying and stories at a context of 512. Of each family (the part of
a variant's name before its first underscore) the one whose bits per byte rise most beyond the context goes on; it is
post-trained for 2% of its steps from each kind of initial state, with three seeds. Before and after: bits per byte by
position to 64k tokens, statistics of the state, effective remembrance, copying of strings longer than any seen,
BABILong-style questions and pass keys by length.
Usage: python -m experiments.length.experiment --corpus BOOKS --validation OTHER_BOOKS --out FOLDER
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.common.command import add_loading, provenance, training_parser
from experiments.common.engine import Plan, Run, train
from experiments.common.measure import answers_right, passkey_counts
from experiments.common.mixture import Books, batch_loader
from experiments.common.models import build, gla, mamba2
from experiments.length.tasks import (
    BATCH,
    KEY_LENGTHS,
    LENGTH,
    ROWS,
    STORY_LENGTHS,
    Questions,
    Tasks,
    Text,
    make_questions,
)
from longrecall.diagnostics.effective_remembrance import effective_remembrance
from longrecall.diagnostics.position_perplexity import PositionLosses, position_edges
from longrecall.diagnostics.state_statistics import StateStatistics, log_positions
from longrecall.diagnostics.streaming import read
from longrecall.files import write_text
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.recipe_states import (
    AnyIntervention,
    FittedNoiseRecipe,
    NoiseRecipe,
    StatePassingRecipe,
    TruncatedBpttRecipe,
)

PRETRAINING_SHARE = 0.4
"""Of the time, where it is limited."""


VARIANTS = {
    "mamba2_n4": mamba2(4),
    "mamba2_n16": mamba2(16),
    "mamba2_n16_g5": mamba2(16, groups=5),
    "mamba2_n64": mamba2(64),
    "gla_k16": gla(16),
    "gla_k32_slow": gla(32, 128.0),
    "slow_gla_k16": gla(16, 4096.0),
    "slow_gla_k32": gla(32, 4096.0),
}


def fresh(variant: str) -> RecurrentLM:
    """A fresh model of ``name:seed`` on the CPU."""
    name, _, seed = variant.partition(":")
    return build(VARIANTS[name], LENGTH, int(seed))


def shares(model: RecurrentLM, ids: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Share of right tokens, and of rows in which every token is right."""
    right = []
    rows = max(8, 2**20 // ids.shape[1])
    for start in range(0, len(ids), rows):
        piece = labels[start : start + rows]
        flat = answers_right(model, ids[start : start + rows], piece).cpu().numpy()
        counts = (piece[:, 1:] != -100).sum(1)
        right += np.split(flat, np.cumsum(counts)[:-1])
    return float(np.concatenate(right).mean()), float(np.mean([r.all() for r in right]))


def measure(model: RecurrentLM, questions: Questions, keys: int) -> dict:
    """Every number of one model."""
    model.eval()
    longest = questions.text.shape[1] - 1
    edges, positions = position_edges(LENGTH, longest), log_positions(longest, LENGTH)
    losses = PositionLosses(edges, len(questions.text), np.ones_like(questions.text), LENGTH)
    states = StateStatistics(positions)
    # Every length of the questions would be compiled anew.
    with torch.compiler.set_stance("force_eager"):
        read(model, questions.text, [losses, states], columns=2048)
        span = min(4096, longest)
        remembrance = effective_remembrance(model, questions.text[:, :span], batch_tokens=2**17, segment_tokens=2048)
        copies = {n: shares(model, *sample) for n, sample in questions.copies.items()}
        stories = {f"{task} {n}": shares(model, *sample)[1] for (task, n), sample in questions.stories.items()}
        lengths = [n for n in KEY_LENGTHS if n <= longest]
        found = {n: passkey_counts(model, n, keys, 0)[0] / keys for n in lengths}
    entries = losses.entries(0)
    return {
        "perplexity": [
            {k: e[k] for k in ("start", "end", "bits_per_byte", "rise", "rise_low", "rise_high")} for e in entries
        ],
        "state": states.entries([layer["mixer"] for layer in model.config.layers]),
        "remembrance": remembrance["points"],
        "copying": copies,
        "babilong": stories,
        "passkey": found,
    }


def rise(row: dict) -> float:
    """How far bits per byte have risen in the last range, in nats per token."""
    value = row["perplexity"][-1]["rise"]
    return math.inf if value is None else value


def brief(row: dict) -> str:
    """One line for the log."""
    bits = [round(e["bits_per_byte"], 3) if e["bits_per_byte"] else None for e in row["perplexity"][4::4]]
    copies = [round(c[0], 2) for c in row["copying"].values()]
    stories = [
        round(float(np.mean([v for k, v in row["babilong"].items() if k.endswith(f" {n}")] or [0])), 2)
        for n in STORY_LENGTHS
    ]
    points = row["remembrance"]
    far = [round(p["value"], 3) for p in points if p["value"] is not None][:: max(1, len(points) // 6)]
    return f"bits {bits} copying {copies} stories {stories} keys {list(row['passkey'].values())} EffRem {far}"


class Experiment:
    """The data, the log and the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cuda.matmul.allow_tf32 = True
        self.began, self.seed_seconds = time.time(), 0.0
        self.corpus, validation = Books(args.corpus, self.device), Books(args.validation, self.device)
        self.questions = make_questions(validation, args.longest, args.count)
        self.say("questions made")
        self.record = {
            **provenance(vars(args) | {"context_length": LENGTH}),
            "variants": {},
            "base": {},
            "results": [],
        }

    def clock(self) -> float:
        """Seconds since the start."""
        return time.time() - self.began

    def say(self, text: str) -> None:
        print(f"{self.clock():6.0f} s  {text}", flush=True)

    def save(self) -> None:
        write_text(self.args.out / "length_generalization.json", json.dumps(self.record, indent=1))

    def build(self, variant: str) -> RecurrentLM:
        """`fresh` on the device."""
        return fresh(variant).to(self.device)

    def weights(self, variant: str) -> dict[str, Tensor]:
        """The pretrained weights of ``name:seed``: those of an earlier run, or those of this one."""
        stem = variant.replace(":", "-") + ".safetensors"
        earlier = self.args.weights / stem if self.args.weights else self.args.out / stem
        return load_file(earlier if earlier.exists() else self.args.out / stem)

    def run(
        self,
        plans: list[tuple[RecurrentLM, Plan]],
        steps: int,
        seed: int,
        ramp: float,
        early: int,
        continued: bool,
        until: float | None = None,
    ) -> list[Run]:
        """Train models side by side on the same batches; `until`: the second at which to be done, with fewer steps."""
        rows = self.args.rows
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=self.device)
        labels, text = ids.clone(), torch.arange(BATCH) < rows[0]
        runs = [Run(model, plan, steps, ids, labels, text) for model, plan in plans]
        loader = batch_loader(Tasks(seed, steps, rows, ramp, early), self.args.workers)
        books = Text(self.corpus, rows[0], seed, steps, continued)

        def next_batch(step: int) -> tuple[Tensor, Tensor]:
            made = [torch.as_tensor(x).to(self.device, non_blocking=True) for x in next(loader)]
            excerpts = books.take(step, BATCH - len(made[0]))
            return torch.cat([excerpts, made[0]]), torch.cat([excerpts, made[1]])

        def forward(first: int, end: int) -> None:
            train(runs, end, next_batch, ids, labels, first=first)

        done = 0 if until is None else self.plateau(runs, forward, until)
        forward(done, runs[0].steps)
        return runs

    def plateau(self, runs: list[Run], forward: Callable[[int, int], None], until: float) -> int:
        """Train at the peak rate for the share --hold of the steps or of the time, whichever is over first.

        What was done is that share of the steps then: the runs' `steps` are set so. Returns the steps done.
        """
        hold, began = self.args.hold, self.clock()
        end, most = began + hold * (until - began), int(hold * runs[0].steps)
        done = 0
        while done < most and (done == 0 or self.clock() < end):
            # Each call waits for the GPU, or the clock would run behind it.
            forward(done, min(done + 50, most))
            done = min(done + 50, most)
        if done < most:
            for run in runs:
                run.steps = max(done + 1, round(done / hold))
        self.say(f"{done} steps at the peak rate; {runs[0].steps} in all")
        return done

    def pretrain(self) -> dict[str, str]:
        """Pretrain every variant that no earlier run left and measure all; return the bases of post-training."""
        args = self.args
        models = {variant: self.build(variant) for variant in args.variants}
        fresh = []
        for variant, model in models.items():
            if args.weights and (args.weights / f"{variant.replace(':', '-')}.safetensors").exists():
                model.load_state_dict(self.weights(variant), strict=False)
            else:
                fresh.append(variant)
        if fresh:
            plan = {"warmup": 200, "hold": args.hold, "compiled": args.compiled}
            plans = [(models[v], Plan(v, args.learning_rate, **plan)) for v in fresh]
            until = None if args.seconds is None else PRETRAINING_SHARE * args.seconds
            runs = self.run(plans, args.steps, 0, 0.4, args.early, False, until)
            # The recall grows harder by the planned number.
            self.record["settings"] |= {"steps": runs[0].steps, "planned_steps": args.steps}
            self.say("pretrained: " + " ".join(f"{run.plan.name} {run.loss.item():.3f}" for run in runs))
            for run in runs:
                run.captured.release()
        for variant, model in models.items():
            weights = {n: t.cpu().contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
            save_file(weights, args.out / f"{variant.replace(':', '-')}.safetensors")
        for variant, model in models.items():
            row = {"pretrained_here": variant in fresh, **measure(model, self.questions, args.keys)}
            self.record["variants"][variant] = row
            self.save()
            self.say(f"{variant} ({model.state_size()}) rise {rise(row):.3f} {brief(row)}")
        return self.bases()

    def bases(self) -> dict[str, str]:
        """The illest variant of each family by its name, or the --bases illest of all, the illest first."""
        ordered = sorted(self.record["variants"], key=lambda name: -rise(self.record["variants"][name]))
        if self.args.bases:
            return {name: name for name in ordered[: self.args.bases]}
        return {name.split("_")[0]: name for name in reversed(ordered)}

    def interventions(self, base: dict) -> dict[str, AnyIntervention | None]:
        """The arms; plain noise has the mean deviation that the base's states have after a training length."""
        state = base["state"]
        at = state["positions"].index(LENGTH)
        spread = float(np.mean([head["std"][at] for layer in state["layers"] for head in layer["heads"]]))
        return {
            "zero": None,
            "noise": NoiseRecipe(std=spread),
            "fitted_noise": FittedNoiseRecipe(),
            "state_passing": StatePassingRecipe(),
            "state_passing_text": StatePassingRecipe(text_only=True),
            "truncated_bptt": TruncatedBpttRecipe(),
        }

    def time_for(self, seeds: int) -> bool:
        """Whether so many seeds of post-training would end in time, each as slow as the slowest so far."""
        return self.args.seconds is None or self.clock() + seeds * self.seed_seconds < self.args.seconds

    def post_train(self, name: str) -> None:
        """Every intervention on one base, seed by seed; a later base only if there is time for all of its seeds."""
        if self.record["results"] and not self.time_for(self.args.seeds):
            self.say(f"no time left for {name}")
            return
        for seed in range(self.args.seeds):
            if not self.time_for(1):
                self.say(f"no time left for {name} seed {seed}")
                return
            began = self.clock()
            for continued in (False, True):
                self.post_train_seed(name, seed, continued)
            self.seed_seconds = max(self.seed_seconds, self.clock() - began)

    def post_train_seed(self, name: str, seed: int, continued: bool) -> None:
        """The arms that read fresh excerpts, or the one whose rows go on where they stopped (`continued`)."""
        args, base, start = self.args, self.record["variants"][name], self.weights(name)
        steps = args.post_steps or max(1, self.record["settings"]["steps"] // 50)
        plans = []
        for arm, recipe in self.interventions(base).items():
            if (arm == "truncated_bptt") == continued:
                model = self.build(name)
                model.load_state_dict(start, strict=False)
                plan = {"warmup": max(1, steps // 10), "seed": seed, "initial": recipe, "compiled": args.compiled}
                plans.append((model, Plan(arm, args.post_rate, **plan)))
        for run in self.run(plans, steps, 1000 + seed, 0.0, 0, continued):
            run.captured.release()
            row = {"model": name, "arm": run.plan.name, "seed": seed, **measure(run.model, self.questions, args.keys)}
            self.record["results"].append(row)
            self.save()
            self.say(f"{name} {run.plan.name} seed {seed} rise {rise(row):.3f} {brief(row)}")
        del run, plans
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = training_parser(__doc__)
    add_loading(parser)
    parser.add_argument("--weights", type=Path, help="folder of earlier weights: what is there is not pretrained")
    parser.add_argument("--variants", nargs="+", default=["mamba2_n4:6", "mamba2_n16:0", "gla_k16:0"])
    parser.add_argument("--rows", type=int, nargs=5, default=ROWS, help="books, phone books, keys, copies, stories")
    parser.add_argument("--early", type=int, default=800, help="steps of easy recall at the start")
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--post-steps", type=int, help="of post-training; default: 2 percent of --steps")
    parser.add_argument("--post-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--count", type=int, default=256, help="strings to copy; a quarter as many stories")
    parser.add_argument("--keys", type=int, default=256)
    parser.add_argument(
        "--bases", type=int, help="post-train so many of the illest; default: the illest of each family"
    )
    parser.add_argument("--seconds", type=float, help="end by then: fewer steps, fewer bases; needs --hold")
    parser.add_argument("--pretrain-only", action="store_true")
    args = parser.parse_args()
    if args.seconds is not None and not 0 < args.hold < 1:
        parser.error("--seconds needs a --hold between 0 and 1: the length of the plateau sets the number of steps")
    args.out.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(args)
    bases = experiment.pretrain()
    experiment.record["base"] = bases
    experiment.save()
    if not args.pretrain_only:
        for name in bases.values():
            experiment.post_train(name)


if __name__ == "__main__":
    main()
