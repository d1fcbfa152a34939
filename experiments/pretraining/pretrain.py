"""Pretrain the two small base models that ship with longrecall (one Mamba-2, one GLA) on one GPU.

Whether a small recurrent model learns recall at all is a lottery over seeds: some sit on the plateau of guessing among
the stored numbers. So several seeds start on easy recall, the best of each family go on, and the log says so.
Usage: python -m experiments.pretraining.pretrain --corpus BOOKS --validation OTHER_BOOKS --out FOLDER
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from experiments.common.command import add_loading, provenance, training_parser
from experiments.common.engine import Plan, Run, train
from experiments.common.measure import bits_per_byte, passkey_counts, phonebook_counts
from experiments.common.mixture import Books, Recall, batch_loader
from experiments.common.models import build, gla, mamba2

LENGTH = 512
PAIRS = (1, 2, 4, 8, 16, 32)
ONE_LETTER_PAIRS = (2, 4, 8, 16, 24)
CANDIDATES = {
    "mamba2": mamba2(8),
    "mamba2_n16": mamba2(16),
    "mamba2_n4": mamba2(4),
    "mamba2_n4_g5": mamba2(4, groups=5),
    "mamba2_n4_l2": mamba2(4, width=192, layers=2),
    "mamba2_g5": mamba2(8, groups=5),
    "gla": gla(4),
    "gla_k2": gla(2),
}


def measure(run: Run, validation: Books, queries: int) -> dict:
    """A quick look at one model."""
    run.model.eval()
    result = {
        "name": run.plan.name,
        "loss": run.loss.item(),
        "phonebook": {p: round(mean(phonebook_counts(run.model, p, queries, 0)), 3) for p in PAIRS},
        "one_letter": {p: round(mean(phonebook_counts(run.model, p, queries, 0, 1, 1)), 3) for p in ONE_LETTER_PAIRS},
        "passkey": {n: round(passkey_counts(run.model, n, 256, 0)[0] / 256, 3) for n in (128, 512, 1024, 2048)},
        "bits_per_byte": [
            round(x, 3) for x, _ in bits_per_byte(run.model, validation, [0, 256, 512, 1024, 2048], 64, 0)
        ],
    }
    run.model.train()
    print(json.dumps(result), flush=True)
    return result


def mean(counts) -> float:
    """Share of right answers."""
    return float(counts[:, 0].sum() / counts[:, 1].sum())


def family(run: Run) -> str:
    """mamba2 or gla."""
    return run.plan.name.split("_")[0].split(":")[0]


def best_of(runs: list[Run], found: list[dict], count: int) -> list[Run]:
    """The `count` runs of every family that recall most of few pairs."""

    def score(result: dict) -> float:
        return result["phonebook"][2] + result["phonebook"][4] + result["one_letter"][8]

    ranked = [run for run, _ in sorted(zip(runs, found, strict=True), key=lambda pair: -score(pair[1]))]
    return [run for run in ranked if [other for other in ranked if family(other) == family(run)].index(run) < count]


def save(run: Run, folder: Path) -> None:
    """Write the weights (float32) and the config of a finalist."""
    weights = {name: t.contiguous().cpu() for name, t in run.model.state_dict().items() if name != "lm_head.weight"}
    stem = run.plan.name.replace(":", "-")
    save_file(weights, folder / f"{stem}.safetensors")
    (folder / f"{stem}.json").write_text(run.model.config.to_json_string())


def main() -> None:
    parser = training_parser(__doc__)
    add_loading(parser)
    parser.add_argument("--steps", type=int, default=26000)
    parser.add_argument("--trial-steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop early, at the last finished check")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--trials", default="mamba2:0,mamba2:1,mamba2:2,mamba2:3,gla:0,gla:1,gla:2,gla_k2:0")
    parser.add_argument("--keep", type=int, default=1, help="trials of each family that go on")
    parser.add_argument("--early", type=int, default=800, help="steps of easy recall at the start")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    corpus, validation = Books(args.corpus, device), Books(args.validation, device)
    books, keys = args.batch * 5 // 16, args.batch // 8
    easy = args.batch - keys - books // 2
    data = Recall(0, args.steps, LENGTH, args.batch - books - keys, keys, early=args.early, early_phonebooks=easy)
    loader = batch_loader(data, args.workers)
    generator = torch.Generator(device=device).manual_seed(0)
    ids = torch.zeros(args.batch, LENGTH, dtype=torch.long, device=device)
    labels = ids.clone()
    runs = []
    for trial in args.trials.split(","):
        name, seed = trial.split(":")
        plan = Plan(trial, args.learning_rate, warmup=200, seed=int(seed), compiled=args.compiled)
        runs.append(Run(build(CANDIDATES[name], LENGTH, int(seed), device), plan, args.steps, ids, labels))

    def next_batch(step: int):
        made, wanted = next(loader)
        text = corpus.crops(generator, args.batch - len(made), LENGTH)
        made, wanted = (torch.as_tensor(x).to(device, non_blocking=True) for x in (made, wanted))
        return torch.cat([text, made]), torch.cat([text, wanted])

    log = []

    def look(step: int, queries: int) -> list[dict]:
        # Every length of the questions would be compiled anew.
        with torch.compiler.set_stance("force_eager"):
            found = [
                {"step": step, "seconds": round(time.time() - began, 1), **measure(run, validation, queries)}
                for run in runs
            ]
        log.extend(found)
        (args.out / "pretraining.json").write_text(json.dumps(provenance(vars(args)) | {"log": log}, indent=1))
        return found

    step = 0
    for stop in [args.trial_steps, *range(6000, args.steps, 4000), args.steps]:
        if time.time() - began > args.seconds:
            break
        train(runs, stop, next_batch, ids, labels, first=step)
        step = stop
        print(f"step {step}, {time.time() - began:.0f} s", flush=True)
        found = look(step, 1024)
        if step == args.trial_steps:
            runs = best_of(runs, found, args.keep)
    for run in runs:
        save(run, args.out)
    print(f"done after {step} steps, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
