"""Training on several GPUs of one machine: steps of `longrecall train` under every way of sharing the work.

    python benchmarks/gpu_parallel.py --out benchmarks/results/gpu_parallel.json
    python benchmarks/gpu_parallel.py --tiny --gpus 2

One command: it starts torchrun for each row. The rows are the 400M Gated DeltaNet at 8 x 4,096 tokens a GPU (one GPU,
data parallelism, FSDP2, from four GPUs on HSDP), one sequence of 131,072 tokens on one GPU and cut over all of them,
and the 1.5B at 65,536 tokens, cut over all. float32 weights under bf16, AdamW, clipping: what a recipe's run does, in
the run's own code. A batch is drawn once and used in every step, so that the input pipeline plays no part; nothing is
saved.

Milliseconds are medians over the timed steps of the slowest process. Bytes are those of one process, the largest:
weights and optimizer between steps; the peak of a step; activations, the peak less weights, optimizer and gradients
(what a sharded layer gathers counts among them). ``--tiny`` runs small models on the CPU, where no peak is known.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "layers": [
        {"mixer": {"type": "gated_delta_net", "num_heads": 2, "key_dim": 16, "value_dim": 16}, "mlp_size": 64},
    ]
    * 2,
}
WORDS = 4_000_000
"""Of the text that batches are drawn from."""


@dataclass(frozen=True)
class Case:
    """A row: a model, a batch, and how the processes share the work."""

    name: str
    model: str
    rows: int
    """Of one data-parallel process."""
    length: int
    gpus: int
    parallel: dict[str, int]
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """Of one step of all processes."""
        return self.rows * self.length * self.gpus // self.parallel.get("context", 1)


def cases(gpus: int, tiny: bool) -> list[Case]:
    """The rows for so many GPUs."""
    small, large = ("tiny", "tiny") if tiny else ("gated_delta_net_400m", "gated_delta_net_1.5b")
    rows, length, long, larger = (2, 64, 128, 128) if tiny else (8, 4096, 131_072, 65_536)
    found = [
        Case("one GPU", small, rows, length, 1, {}),
        Case("data parallel", small, rows, length, gpus, {}),
        Case("FSDP2", small, rows, length, gpus, {"shard": gpus}),
    ]
    if gpus >= 4:
        found.append(Case("HSDP", small, rows, length, gpus, {"replicate": 2, "shard": gpus // 2}))
    return [
        *found,
        Case("long sequence, one GPU", small, 1, long, 1, {}),
        Case("long sequence, context parallel", small, 1, long, gpus, {"context": gpus}),
        Case("large model, context parallel", large, 1, larger, gpus, {"context": gpus}, checkpointing=True),
    ]


class Measured(BaseException):
    """Ends a run from inside after the last timed step: nothing is to be saved."""


def measure(case: Case, folder: Path, warmup: int, steps: int) -> dict[str, Any]:
    """Run a case in this process, one of torchrun's; returns what this process found."""
    from longrecall.training import run
    from longrecall.training.parallel.shard import local
    from longrecall.training.recipe import Recipe
    from longrecall.training.trainer import RecurrentTrainer

    gpu = torch.cuda.is_available()
    moments: list[Any] = []
    losses: list[torch.Tensor] = []
    found: dict[str, Any] = {}

    def mark() -> None:
        """Keep this moment: on a GPU that of its queue, which nothing waits for."""
        moments.append(torch.cuda.Event(enable_timing=True) if gpu else time.perf_counter())
        if gpu:
            moments[-1].record()

    class Timed(RecurrentTrainer):
        """Uses its first batch in every step, and looks at the clock where a step begins."""

        kept: Any = None
        gradients = peak = 0

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            if self.kept is None:
                self.kept = super().get_batch_samples(epoch_iterator, num_batches, device)
            step = self.state.global_step
            if step == 1 and gpu:
                torch.cuda.reset_peak_memory_stats()
            if step == 3 and gpu:
                # Of launched steps: what a recording keeps between steps counts as free for others.
                self.peak = torch.cuda.max_memory_allocated()
            if step >= warmup:
                mark()
            if step == warmup + steps:
                self.count_bytes()
                raise Measured
            batches, labels = self.kept
            self.micro_batches_left = num_batches
            # A step takes some entries out of its batches.
            return [dict(batch) for batch in batches], labels

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            losses.append(super().training_step(*arguments, **options))
            self.gradients = sum(local(p.grad).nbytes for p in self.job.model.parameters() if p.grad is not None)
            return losses[-1]

        def count_bytes(self) -> None:
            weights = sum(local(p).nbytes for p in self.job.model.parameters())
            entries = [x for state in self.active_optimizer.state.values() for x in state.values()]
            optimizer = sum(local(x).nbytes for x in entries)
            found["weights_and_optimizer_gib"] = (weights + optimizer) / 2**30
            if gpu:
                found["peak_gib"] = self.peak / 2**30
                found["activations_gib"] = (self.peak - weights - optimizer - self.gradients) / 2**30

    run.RecurrentTrainer = Timed  # type: ignore[misc]
    recipe = {
        "model": {"checkpoint": str(folder / case.model)},
        "data": {"context_length": case.length, "sources": [{"kind": "text", "path": str(folder / "text.txt")}]},
        "parallel": case.parallel,
        "run": {
            "output": str(folder / "out"),
            "steps": warmup + steps + 1,
            "batch_size": case.rows,
            "gradient_checkpointing": case.checkpointing,
            "precision": "bf16",
            "log_every": warmup + steps + 1,
            "report_to": "none",
        },
    }
    with contextlib.suppress(Measured):
        run.run_recipe(Recipe.from_dict(recipe), force=True, show_progress=False)
    pairs = itertools.pairwise(moments)
    found["seconds"] = [a.elapsed_time(b) / 1e3 if gpu else b - a for a, b in pairs]
    return found | {"losses": [float(losses[0]), float(losses[-1])]}


def work(case: Case, folder: Path, warmup: int, steps: int) -> None:
    """One process of a row: measure, gather, and let the first one write `result.json`."""
    found = measure(case, folder, warmup, steps)
    every = [found]
    if case.gpus > 1:
        every = [{} for _ in range(case.gpus)]
        torch.distributed.all_gather_object(every, found)
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(summary(case, every)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def summary(case: Case, every: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a row from those of its processes."""
    seconds = max(statistics.median(found["seconds"]) for found in every)
    row: dict[str, Any] = {"ms": 1e3 * seconds, "tokens_per_second": case.tokens / seconds}
    for key in ("weights_and_optimizer_gib", "peak_gib", "activations_gib"):
        values = [found[key] for found in every if key in found]
        row |= {key: max(values)} if values else {}
    return row | {"losses": every[0]["losses"]}


def launch(case: Case, folder: Path, warmup: int, steps: int) -> dict[str, Any]:
    """Run a row under torchrun; RuntimeError with its last words where it fails."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    words = [
        "--work",
        json.dumps(asdict(case)),
        "--folder",
        str(folder),
        "--warmup",
        str(warmup),
        "--steps",
        str(steps),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    done = subprocess.run([*command, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode or not result.exists():
        said = [line for line in done.stderr.splitlines() if "Error" in line or "error:" in line]
        raise RuntimeError((said or done.stderr.splitlines() or ["it said nothing"])[0])
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def prepare(folder: Path, wanted: list[Case], tiny: bool) -> None:
    """Write the checkpoints, with random weights, and the text."""
    from longrecall.models.config import RecurrentConfig
    from longrecall.models.description import read_description
    from longrecall.models.initialising import BYTES, initialise

    for model in dict.fromkeys(case.model for case in wanted):
        config = RecurrentConfig(**TINY) if model == "tiny" else read_description(CONFIGS / f"{model}.json")
        initialise(config, folder / model, dtype=torch.bfloat16, tokenizer=BYTES)
    words = torch.randint(0, 1000, (20_000 if tiny else WORDS,), generator=torch.Generator().manual_seed(0)).tolist()
    lines = (" ".join(f"word{number}" for number in words[i : i + 20]) for i in range(0, len(words), 20))
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")


def compare(rows: Rows, found: dict[str, dict[str, Any]]) -> None:
    """Add what the issue asks for: each way against one GPU."""
    for one, others in (
        ("one GPU", ("data parallel", "FSDP2", "HSDP")),
        ("long sequence, one GPU", ("long sequence, context parallel",)),
    ):
        for name in others:
            if one in found and name in found:
                base, row = found[one], found[name]
                ratios = {"speedup": row["tokens_per_second"] / base["tokens_per_second"]}
                for key in ("weights_and_optimizer_gib", "peak_gib", "activations_gib"):
                    if base.get(key):
                        ratios[key.removesuffix("_gib")] = row[key] / base[key]
                rows.add(f"{name} / {one}", **ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="2, 4 or 8 [all that are visible]")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--warmup", type=int, default=13, help="steps before the clock starts [%(default)s]")
    parser.add_argument("--steps", type=int, default=10, help="timed steps [%(default)s]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(Case(**json.loads(args.work)), args.folder, args.warmup, args.steps)
        return
    if args.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    here = 2 if args.tiny else torch.cuda.device_count()
    gpus = args.gpus or max(2, here)
    wanted = [
        case for case in cases(gpus, args.tiny) if args.only in case.name and case.gpus <= (gpus if args.tiny else here)
    ]
    if not wanted:
        parser.error(f"it sees {here} GPUs, and has no such row for them")
    rows, found = Rows("gpu_parallel", args.out), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, wanted, args.tiny)
        for case in wanted:

            def row(case: Case = case) -> dict[str, Any]:
                found[case.name] = launch(case, folder, args.warmup, args.steps)
                return asdict(case) | found[case.name]

            rows.measure(case.name, lambda row=row: {k: v for k, v in row().items() if k != "name"})
    compare(rows, found)


if __name__ == "__main__":
    main()
