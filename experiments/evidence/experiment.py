"""The evidence: six ways to go on from a base model at equal tokens, each at its own best learning rate.

Arms: plain continued training, and the five initialisations of the enlarged state, each with and without state passing.
First every arm tries each learning rate of the touched parameters on a seed of its own; then it runs at its best one
with three other seeds, which draw the enlarged weights, the batches and the questions anew. All arms share the schedule
and, seed by seed, every batch.
Usage: python -m experiments.evidence.experiment --base src/longrecall/assets/gla-base --method merge_heads ... (--help)
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from experiments.common.command import add_loading, provenance, training_parser
from experiments.common.engine import Plan, Run, train
from experiments.common.measure import bits_per_byte, passkey_counts, phonebook_counts
from experiments.common.mixture import Books, Recall, batch_loader
from experiments.evidence.records import ARMS
from longrecall.models.loading import load
from longrecall.surgery.expansion import expand

RATES = (5e-4, 1e-3, 3e-3, 1e-2)
SELECTION_SEED = 98
PAIRS = (1, 2, 4, 8, 16, 32, 64)
ONE_LETTER_PAIRS = (1, 2, 4, 8, 16, 24)
MOST_PAIRS = 64
EDGES = [0, 256, 512, 1024, 2048, 4096, 8192, 16384]


class Study:
    """One base model, its arms and the text they read."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = True
        self.corpus, self.validation = Books(args.corpus, self.device), Books(args.validation, self.device)
        self.began = time.time()
        self.folder = Path(tempfile.mkdtemp())
        self.touched = {}
        for arm in ARMS[1:]:
            options = {"factor": args.factor} if args.method == "grow_state" else {}
            for seed in (SELECTION_SEED, *range(args.seeds)):
                summary = expand(
                    args.base, self.folder / f"{arm}-{seed}", args.method, "all", arm, seed=seed, **options
                )
            self.touched[arm] = frozenset(summary.touched)
        self.touched["plain"] = self.touched["reinit"]
        texts = {name: getattr(args, name).name for name in ("base", "corpus", "validation")}
        self.record = {
            **provenance(vars(args) | texts | {"rates": RATES, "edges": EDGES}),
            "state_size": {
                "before": load(args.base).state_size(),
                "after": load(self.folder / "reinit-0").state_size(),
            },
            "selection": [],
            "results": [],
        }

    def save(self) -> None:
        self.args.out.write_text(json.dumps(self.record, indent=1))

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:6.0f} s  {text}", flush=True)

    def train_group(self, seed: int, wishes: list[tuple[str, float, bool]]) -> list[Run]:
        """Train (arm, touched rate, state passing) side by side on the batches of one seed."""
        args = self.args
        books, keys = args.batch * 5 // 16, args.batch // 8
        ids = torch.zeros(args.batch, args.length, dtype=torch.long, device=self.device)
        labels = ids.clone()
        runs = []
        for arm, rate, passing in wishes:
            path = args.base if arm == "plain" else self.folder / f"{arm}-{seed}"
            share = args.passing * passing
            plan = Plan(
                arm,
                args.learning_rate,
                self.touched[arm],
                rate,
                share,
                warmup=args.warmup,
                hold=0.5,
                seed=seed,
                compiled=args.compiled,
            )
            runs.append(Run(load(path, torch.float32, self.device), plan, args.steps, ids, labels))
        data = Recall(1000 + seed, args.steps, args.length, args.batch - books - keys, keys, MOST_PAIRS, 0.0)
        loader = batch_loader(data, args.workers)
        generator = torch.Generator(device=self.device).manual_seed(1000 + seed)

        def next_batch(step: int):
            made = [torch.as_tensor(x).to(self.device, non_blocking=True) for x in next(loader)]
            text = self.corpus.crops(generator, books, args.length)
            # Shuffled, so that a passed state comes from any kind of text.
            order = torch.randperm(args.batch, generator=generator, device=self.device)
            return torch.cat([text, made[0]])[order], torch.cat([text, made[1]])[order]

        train(runs, args.steps, next_batch, ids, labels)
        for run in runs:
            run.captured.release()
            for module in run.handovers:
                module.progress.fill_(1.0)
            run.model.eval()
        return runs

    def score(self, model) -> float:
        """What the learning rate is chosen by: mean recall of the harder half of the cells, on books of their own."""
        counts = [phonebook_counts(model, p, 1024, SELECTION_SEED) for p in PAIRS[2:]]
        counts += [phonebook_counts(model, p, 1024, SELECTION_SEED, 1, 1) for p in ONE_LETTER_PAIRS[2:]]
        return float(np.mean([c[:, 0].sum() / c[:, 1].sum() for c in counts]))

    def measure(self, model, seed: int) -> dict:
        """Every cell of one model as counts (right, asked) and means."""
        args = self.args
        # Every length of the questions would be compiled anew.
        with torch.compiler.set_stance("force_eager"):
            two = {p: phonebook_counts(model, p, args.queries, seed) for p in PAIRS}
            one = {p: phonebook_counts(model, p, args.queries, seed, 1, 1) for p in ONE_LETTER_PAIRS}
            return {
                "phonebook": {p: [int(c[:, 0].sum()), int(c[:, 1].sum()), spread(c)] for p, c in two.items()},
                "one_letter": {p: [int(c[:, 0].sum()), int(c[:, 1].sum()), spread(c)] for p, c in one.items()},
                "passkey": {n: passkey_counts(model, n, args.passkeys, seed) for n in args.lengths},
                "bits_per_byte": bits_per_byte(model, self.validation, EDGES, 64, seed),
            }


def spread(counts: np.ndarray) -> float:
    """Standard error of the share of right answers, books as the independent units."""
    share = counts[:, 0] / counts[:, 1]
    return float(share.std(ddof=1) / np.sqrt(len(share)))


def brief(row: dict) -> str:
    """The cells of a row as shares."""
    shares = {
        task: [round(c[0] / c[1], 3) for c in row[task].values()] for task in ("phonebook", "one_letter", "passkey")
    }
    return f"{shares} {[round(b, 3) for b, _ in row['bits_per_byte']]}"


def release(runs: list[Run]) -> None:
    """Give the memory of captured steps back."""
    runs.clear()
    gc.collect()
    torch.cuda.empty_cache()


def select(study: Study) -> dict[tuple[str, bool], float]:
    """The best rate of the touched parameters for every (arm, state passing)."""
    best: dict[tuple[str, bool], tuple[float, float]] = {}
    for passing in (True, False):
        for rate in RATES:
            runs = study.train_group(SELECTION_SEED, [(arm, rate, passing) for arm in ARMS])
            for run in runs:
                with torch.compiler.set_stance("force_eager"):
                    found = study.score(run.model)
                row = {"arm": run.plan.name, "state_passing": passing, "rate": rate, "score": found}
                study.record["selection"].append(row | {"loss": run.loss.item()})
                study.say(f"select {run.plan.name} passing {passing} {rate:g}: {found:.4f}")
                key = (run.plan.name, passing)
                best[key] = max(best.get(key, (-1.0, 0.0)), (found, rate))
            del run
            release(runs)
            study.save()
    return {key: rate for key, (_, rate) in best.items()}


def main() -> None:
    parser = training_parser(__doc__)
    add_loading(parser)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--method", required=True, choices=("merge_heads", "grow_state"))
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--passkeys", type=int, default=1408)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passing", type=float, default=0.25, help="probability of a passed state where it is on")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096, 16384])
    args = parser.parse_args()
    study = Study(args)
    best = select(study)
    study.record["results"].append({"arm": "base", **study.measure(load(args.base, torch.float32, study.device), 0)})
    for seed in range(args.seeds):
        for passing in (True, False):
            runs = study.train_group(seed, [(arm, best[arm, passing], passing) for arm in ARMS])
            for run in runs:
                row = {"arm": run.plan.name, "seed": seed, "state_passing": passing, "rate": run.plan.touched_rate}
                row |= {"loss": run.loss.item(), **study.measure(run.model, seed)}
                study.record["results"].append(row)
                study.say(f"{run.plan.name} seed {seed} passing {passing} {brief(row)}")
            study.save()
            del run
            release(runs)


if __name__ == "__main__":
    main()
