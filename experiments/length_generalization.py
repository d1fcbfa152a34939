"""Length generalization: pretrain at 512 tokens until a model falls ill beyond them, then try every intervention.

One small Mamba-2 and one small GLA learn books, recall, copying and stories at a context of 512. Of each family the
variant whose bits per byte rise most beyond the context goes on; it is post-trained for 2% of its steps from each kind
of initial state, with three seeds. Before and after: bits per byte by position to 64k tokens, statistics of the state,
effective remembrance, copying of strings longer than any seen, BABILong-style questions and pass keys by length.
Usage: python experiments/length_generalization.py --corpus BOOKS --validation OTHER_BOOKS --out FOLDER
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import transformers
from engine import Plan, Run, train
from measure import answers_right, passkey_counts
from mixture import Books, Recall, opened, recall_loader
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

import longrecall
from longrecall.diagnostics.effective_remembrance import effective_remembrance
from longrecall.diagnostics.position_perplexity import PositionLosses, position_edges
from longrecall.diagnostics.state_statistics import StateStatistics, log_positions
from longrecall.diagnostics.streaming import read
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.tasks.babilong.task import TASKS, babilong_byte_batch
from longrecall.tasks.copying import copying_byte_batch
from longrecall.training.recipe_states import (
    AnyIntervention,
    FittedNoiseRecipe,
    NoiseRecipe,
    StatePassingRecipe,
    TruncatedBpttRecipe,
)

LENGTH = 512
BATCH = 32
ROWS = (10, 14, 4, 2, 2)
"""Rows of a batch: books, phone books, pass keys, strings to copy, stories."""
COPY_LENGTHS = (8, 20, 40, 64, 96, 128)
STORY_LENGTHS = (512, 1024, 2048, 4096, 8192)
KEY_LENGTHS = (512, 1024, 2048, 4096)
FORM_FEED = 12


def mamba2(state_dim: int, groups: int) -> dict:
    """160 wide, 3 layers, 5 heads of 64."""
    mixer = {"type": "mamba2", "inner_dim": 320, "head_dim": 64, "state_dim": state_dim, "groups": groups}
    return {"hidden_size": 160, "layers": [{"mixer": mixer}] * 3}


def gla(key_dim: int, divisor: float) -> dict:
    """128 wide, 3 layers, 4 heads; a larger divisor of the gate forgets more slowly."""
    mixer = {"type": "gla", "num_heads": 4, "key_dim": key_dim, "value_dim": 32, "conv_width": 4}
    return {"hidden_size": 128, "layers": [{"mixer": mixer | {"gate_divisor": divisor}, "mlp_size": 320}] * 3}


VARIANTS = {
    "mamba2_n4": mamba2(4, 1),
    "mamba2_n16": mamba2(16, 1),
    "mamba2_n16_g5": mamba2(16, 5),
    "mamba2_n64": mamba2(64, 1),
    "gla_k16": gla(16, 16.0),
    "gla_k32_slow": gla(32, 128.0),
}


class Tasks(IterableDataset):
    """The rows that are no books: phone books and pass keys (`Recall`), copying, stories; by (seed, step) alone."""

    def __init__(self, seed: int, steps: int, rows: tuple[int, ...], ramp: float, early: int) -> None:
        books, phonebooks, keys, self.copies, self.stories = rows
        self.seed, self.steps = seed, steps
        easy = phonebooks + books // 2
        self.recall = Recall(seed, steps, LENGTH, phonebooks, keys, ramp=ramp, early=early, early_phonebooks=easy)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(first, self.steps, stride):
            yield self.batch(step)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels ``[rows, 512]`` of one step."""
        g = np.random.Generator(np.random.PCG64([17, self.seed, step]))
        parts = [
            self.recall.batch(step),
            opened(*copying_byte_batch(g, self.copies, LENGTH - 1)),
            opened(*babilong_byte_batch(g, self.stories, LENGTH - 1, questions=3)),
        ]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


class Text:
    """Rows of books: excerpts from anywhere, or rows that go on where they stopped, each inside one document."""

    def __init__(self, books: Books, rows: int, seed: int, steps: int, continued: bool) -> None:
        self.books, self.continued = books, continued
        self.generator = torch.Generator(device=books.data.device).manual_seed(seed)
        if continued:
            need = steps * LENGTH + 1
            ends = [*(books.data == FORM_FEED).nonzero()[:, 0].tolist(), len(books.data)]
            spans = [(a + 1, b) for a, b in zip([-1, *ends[:-1]], ends, strict=True) if b - a > need]
            draw = np.random.Generator(np.random.PCG64([19, seed]))
            chosen = [spans[i] for i in draw.integers(len(spans), size=rows)]
            self.starts = torch.tensor([int(draw.integers(a, b - need)) for a, b in chosen], device=books.data.device)

    def take(self, step: int, rows: int) -> Tensor:
        """int64 ``[rows, 512]``."""
        if not self.continued:
            return self.books.crops(self.generator, rows, LENGTH)
        at = self.starts[:, None] + step * LENGTH + torch.arange(LENGTH, device=self.starts.device)
        return self.books.data[at].long()


@dataclass
class Questions:
    """Everything that is asked, made once for all models."""

    text: np.ndarray
    copies: dict[int, tuple[np.ndarray, np.ndarray]]
    stories: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]


def make_questions(validation: Books, longest: int, count: int) -> Questions:
    """Windows of unseen books, strings to copy and stories, by length."""
    generator = torch.Generator(device=validation.data.device).manual_seed(0)
    text = validation.crops(generator, 16, longest + 1).cpu().numpy()
    g = np.random.Generator(np.random.PCG64(23))
    copies = {n: opened(*copying_byte_batch(g, count, 2 * n + 3, (n, n))) for n in COPY_LENGTHS}
    stories = {
        (task, n): opened(*babilong_byte_batch(g, max(8, count // 4), n - 1, (task,)))
        for task in TASKS
        for n in STORY_LENGTHS
        if n <= longest
    }
    return Questions(text, copies, stories)


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
        self.corpus, validation = Books(args.corpus, self.device), Books(args.validation, self.device)
        self.began = time.time()
        self.questions = make_questions(validation, args.longest, args.count)
        self.say("questions made")
        skipped = ("corpus", "validation", "out", "workers", "weights")
        self.record = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "longrecall": longrecall.__version__,
            "hardware": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "settings": {key: value for key, value in vars(args).items() if key not in skipped}
            | {"context_length": LENGTH},
            "variants": {},
            "base": {},
            "results": [],
        }

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:6.0f} s  {text}", flush=True)

    def save(self) -> None:
        (self.args.out / "length_generalization.json").write_text(json.dumps(self.record, indent=1))

    def build(self, variant: str) -> RecurrentLM:
        """A fresh model of ``name:seed``."""
        name, _, seed = variant.partition(":")
        torch.manual_seed(int(seed))
        config = RecurrentConfig(
            context_length=LENGTH, bos_token_id=256, eos_token_id=256, pad_token_id=257, **VARIANTS[name]
        )
        return RecurrentLM(config).to(self.device)

    def weights(self, variant: str) -> dict[str, Tensor]:
        """The pretrained weights of ``name:seed``: those of an earlier run, or those of this one."""
        stem = variant.replace(":", "-") + ".safetensors"
        earlier = self.args.weights / stem if self.args.weights else self.args.out / stem
        return load_file(earlier if earlier.exists() else self.args.out / stem)

    def run(
        self, plans: list[tuple[RecurrentLM, Plan]], steps: int, seed: int, ramp: float, early: int, continued: bool
    ) -> list[Run]:
        """Train models side by side on the same batches."""
        rows = self.args.rows
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=self.device)
        labels, text = ids.clone(), torch.arange(BATCH) < rows[0]
        runs = [Run(model, plan, steps, ids, labels, text) for model, plan in plans]
        loader = recall_loader(Tasks(seed, steps, rows, ramp, early), self.args.workers)
        books = Text(self.corpus, rows[0], seed, steps, continued)

        def next_batch(step: int) -> tuple[Tensor, Tensor]:
            made = [torch.as_tensor(x).to(self.device, non_blocking=True) for x in next(loader)]
            excerpts = books.take(step, BATCH - len(made[0]))
            return torch.cat([excerpts, made[0]]), torch.cat([excerpts, made[1]])

        train(runs, steps, next_batch, ids, labels)
        return runs

    def pretrain(self) -> dict[str, str]:
        """Pretrain every variant that no earlier run left; return the illest of each family."""
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
            self.run(plans, args.steps, 0, 0.4, args.early, False)
        worst: dict[str, str] = {}
        for variant, model in models.items():
            row = {"pretrained_here": variant in fresh, **measure(model, self.questions, args.keys)}
            self.record["variants"][variant] = row
            self.say(f"{variant} ({model.state_size()}) rise {rise(row):.3f} {brief(row)}")
            weights = {n: t.cpu().contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
            save_file(weights, args.out / f"{variant.replace(':', '-')}.safetensors")
            family = variant.split("_")[0]
            if family not in worst or rise(row) > rise(self.record["variants"][worst[family]]):
                worst[family] = variant
        self.save()
        return worst

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

    def post_train(self, name: str) -> None:
        """Every intervention on one base, seed by seed."""
        args, base = self.args, self.record["variants"][name]
        steps = args.post_steps or max(1, args.steps // 50)
        start = self.weights(name)
        for seed in range(args.seeds):
            for continued in (False, True):
                plans = []
                for arm, recipe in self.interventions(base).items():
                    if (arm == "truncated_bptt") != continued:
                        continue
                    model = self.build(name)
                    model.load_state_dict(start, strict=False)
                    plan = Plan(
                        arm,
                        args.post_rate,
                        warmup=max(1, steps // 10),
                        seed=seed,
                        initial=recipe,
                        compiled=args.compiled,
                    )
                    plans.append((model, plan))
                runs = self.run(plans, steps, 1000 + seed, 0.0, 0, continued)
                for run in runs:
                    run.captured.release()
                    row = {
                        "model": name,
                        "arm": run.plan.name,
                        "seed": seed,
                        **measure(run.model, self.questions, args.keys),
                    }
                    self.record["results"].append(row)
                    self.say(f"{name} {run.plan.name} seed {seed} rise {rise(row):.3f} {brief(row)}")
                self.save()
                del runs, run, plans
                gc.collect()
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
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
    parser.add_argument("--compiled", action="store_true", help="fuse the layers: twice as fast, a slower start")
    parser.add_argument("--pretrain-only", action="store_true")
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(args)
    worst = experiment.pretrain()
    experiment.record["base"] = worst
    experiment.save()
    if not args.pretrain_only:
        for name in worst.values():
            experiment.post_train(name)


if __name__ == "__main__":
    main()
