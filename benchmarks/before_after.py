"""The speeds that a rebuild of the code must keep: this checkout beside another one, in one run on one machine.

    git worktree add ../before 6c26994
    python benchmarks/before_after.py --before ../before --out benchmarks/results/gpu_before_after.json

Both trees are measured by this script, each in processes of its own (`--measure` is such a process), in turns: before,
after, after, before, and so on. A row has the median of every process, the median of those, and the ratio after/before.
On a GPU: bfloat16, medians of CUDA events. On a CPU: one thread, medians of processor seconds; of these the ratios
count alone. An op's time on a CPU depends on where its process has its memory: the same code differs by 12% from one
process to the next. The rows of ops therefore come from many short processes, and have an interval of their ratio: 95%
of all draws of as many rounds, with repetition, from those measured. Rows of memory are in MiB: the largest resident
set after a call over 262,144 tokens with the last logits, less that after one over 4,096, in a process of its own. Only
what both trees offer is used: ops, layers, models and `generate()`'s captured parts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parent.parent
E8 = {"type": "gated_delta_net", "num_heads": 8, "key_dim": 128, "value_dim": 128}
E8 |= {"expansion": {"kind": "headwise", "factor": 8}}
MODEL = "gated_delta_net_400m"
MEMORY = ", MiB"
"""How rows of memory end."""


def captured_parts() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`captured_step`, `captured_segments` and `read_prompt`, wherever the tree that is imported keeps them."""
    try:
        reading = importlib.import_module("longrecall.inference.reading")
        return reading.captured_step, reading.captured_segments, reading.read_prompt
    except ModuleNotFoundError:
        decoding = importlib.import_module("longrecall.models.decoding")
        read_prompt = importlib.import_module("longrecall.models.prefill").read_prompt
        return decoding.captured_step, decoding.captured_segments, read_prompt


def layer_times() -> dict[str, float]:
    """Milliseconds forward and backward of a layer with eight subheads at 8 x 4096."""
    import torch
    from gpu_timing import median_ms

    from longrecall.layers.mixers.registry import mixer_config

    with torch.device("cuda"):
        layer = mixer_config(E8).build(1024).to(torch.bfloat16)
        x = torch.randn(8, 4096, 1024, dtype=torch.bfloat16, requires_grad=True)
        position, weight = torch.zeros(8, dtype=torch.long), torch.randn_like(x)
    leaves = [x, *layer.parameters()]

    def work() -> None:
        y, _ = layer(x, None, mask=None, position=position)
        torch.autograd.grad(y, leaves, weight)

    return {"layer E 8, forward + backward": median_ms(work, repeats=30, warmup=5)}


def model_times() -> dict[str, float]:
    """Milliseconds of a training step of the 400M model, and of its decoding and prefill."""
    import torch
    from gpu_timing import median_ms

    from longrecall.models.description import read_description
    from longrecall.models.recurrent_lm import RecurrentLM

    found: dict[str, float] = {}
    config = read_description(ROOT / "recipes" / "configs" / f"{MODEL}.json")
    with torch.device("cuda"):
        model = RecurrentLM(config).to(torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (8, 4096), device="cuda")

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(input_ids=ids, labels=ids, use_cache=False, loss_only=True).loss.backward()

    found["400M training step, 8 x 4096"] = median_ms(train, repeats=8, warmup=3)
    for parameter in model.parameters():
        parameter.grad = None
    model.eval()
    captured_step, captured_segments, read_prompt = captured_parts()
    prompt = ids[:1]
    with torch.inference_mode():
        for batch in (1, 256):
            step = captured_step(model, batch)
            step.ids.random_(0, config.vocab_size)
            found[f"400M captured decoding, batch {batch}"] = median_ms(step, repeats=200, warmup=10)
        segments = captured_segments(model, 1)
        found["400M prefill 1 x 4096, captured"] = median_ms(lambda: read_prompt(model, segments, prompt, None), 30, 5)
        call = lambda: model(prompt, logits_to_keep=1, use_cache=True)  # noqa: E731
        found["400M prefill 1 x 4096, plain call"] = median_ms(call, repeats=20, warmup=5)
    return found


BASES = {"Mamba-2 base": "mamba2-base", "GLA base": "gla-base"}


def base_model(name: str) -> Any:
    """A base that ships with the package, in the dtype of its file."""
    import longrecall

    return longrecall.load(str(ROOT / "src" / "longrecall" / "assets" / BASES[name])).eval()


def memory_of(name: str) -> float:
    """MiB that a call over 262,144 tokens takes beyond one over 4,096; to be asked once in a process."""
    import torch
    from cpu_timing import peak_rss

    torch.set_num_threads(1)
    model, peaks = base_model(name), []
    for columns in (4096, 262144):
        with torch.no_grad():
            model(torch.ones(1, columns, dtype=torch.long), logits_to_keep=1)
        peaks.append(peak_rss())
    return peaks[1] - peaks[0]


def cpu_memory() -> dict[str, float]:
    """`memory_of` every base."""
    found = {}
    for name in BASES:
        command = [sys.executable, __file__, "--memory", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[f"{name}, 1 x 262144 beyond 1 x 4096{MEMORY}"] = float(done.stdout.splitlines()[-1])
    return found


def processor_ms(work: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of processor time of `work`, which runs once before."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def cpu_ops() -> dict[str, float]:
    """Milliseconds of processor time of two ops, forward and backward: one of many processes (see above)."""
    import torch

    from longrecall.ops import gated_delta_rule, gated_linear_attention

    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2048, 4, 64, requires_grad=True) for _ in range(3))
    decay, beta = -torch.rand(1, 2048, 4), torch.rand(1, 2048, 4)

    def linear() -> None:
        gated_linear_attention(q, k, v, decay)[0].sum().backward()

    def delta() -> None:
        gated_delta_rule(q, torch.nn.functional.normalize(k, dim=-1), v, decay, beta)[0].sum().backward()

    return {
        "gated linear attention, forward + backward": processor_ms(linear, 15),
        "gated delta rule, forward + backward": processor_ms(delta, 15),
    }


def cpu_times() -> dict[str, float]:
    """Milliseconds of processor time: a training step, decoding and reading of the shipped bases."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    model = base_model("Mamba-2 base")
    ids = torch.randint(0, 256, (4, 512))
    found["Mamba-2 base, training step, 4 x 512"] = processor_ms(lambda: model(ids, labels=ids).loss.backward(), 15)
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for name in BASES:
        model = base_model(name)
        generate = partial(model.generate, ids[:1], **options)
        found[f"{name}, generate() of 64 tokens"] = processor_ms(generate, 9)
    model, text = base_model("Mamba-2 base"), ids.new_ones(1, 4096)
    with torch.no_grad():
        found["Mamba-2 base, reading 1 x 4096"] = processor_ms(lambda: model(text, logits_to_keep=1), 9)
    return found


def measure(part: str) -> dict[str, float]:
    """Milliseconds (or MiB) of the rows of one part, by the longrecall that this process imports."""
    import torch

    torch.manual_seed(0)
    if part == "ops":
        return cpu_ops()
    return layer_times() | model_times() if torch.cuda.is_available() else cpu_times() | cpu_memory()


def run(tree: Path, site: str = "", part: str = "models") -> dict[str, float]:
    """`measure` in a process that imports longrecall from `tree`, and what the folder `site` has from there."""
    path = os.pathsep.join(filter(None, (str(tree / "src"), site, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, __file__, "--measure", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {tree} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


Runs = dict[str, list[dict[str, float]]]
"""What every process of each of two sides has measured, in the order of the rounds."""


def in_turns(sides: Sequence[str], rounds: int) -> Iterator[str]:
    """Name the side of the next process: first, second, second, first, and so on."""
    for index in range(rounds):
        yield from sides if index % 2 == 0 else reversed(sides)


def measured(trees: dict[str, Path], rounds: int, part: str) -> Runs:
    """Measure one part of the rows in `rounds` processes of each tree."""
    runs: Runs = {name: [] for name in trees}
    for name in in_turns(list(trees), rounds):
        runs[name].append(run(trees[name], part=part))
        print(name, json.dumps(runs[name][-1]), flush=True)
    return runs


def beside(runs: Runs, row: str) -> dict[str, Any]:
    """The median of each side, their ratio after/before, and the values of all processes."""
    times = {name: [one[row] for one in found] for name, found in runs.items()}
    middle = {name: statistics.median(values) for name, values in times.items()}
    unit = "mib" if row.endswith(MEMORY) else "ms"
    numbers = {f"{name}_{unit}": value for name, value in middle.items()}
    return numbers | {"ratio": middle["after"] / middle["before"]} | {f"{k}s": v for k, v in times.items()}


def interval(befores: Sequence[float], afters: Sequence[float], draws: int = 10_000) -> dict[str, float]:
    """The middle 95% of the ratio of medians over rounds that are drawn again, with repetition."""
    chance, rounds, ratios = random.Random(0), range(len(befores)), []
    for _ in range(draws):
        drawn = chance.choices(rounds, k=len(rounds))
        ratios.append(statistics.median(afters[i] for i in drawn) / statistics.median(befores[i] for i in drawn))
    ratios.sort()
    least = round(0.025 * (draws - 1))
    return {"ratio_low": ratios[least], "ratio_high": ratios[-1 - least]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--commit", default="6c26994", help="its commit, for the record [%(default)s]")
    parser.add_argument("--rounds", type=int, default=4, help="processes of each tree [%(default)s]")
    parser.add_argument("--op-rounds", type=int, default=10, help="the same for ops on a CPU [%(default)s]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=("ops", "models"), help="measure what is imported, print JSON")
    parser.add_argument("--memory", choices=BASES, help="measure the memory of this base alone, print MiB")
    args = parser.parse_args()
    if args.memory:
        print(memory_of(args.memory))
        return
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    if args.before is None or not (args.before / "src" / "longrecall").is_dir():
        parser.error("--before: a checkout of longrecall")
    if min(args.rounds, args.op_rounds) < 1:
        parser.error("--rounds and --op-rounds: at least 1")
    import torch
    from gpu_timing import Rows

    rows = Rows("before_after", args.out)
    rows.result["before"] = args.commit
    trees = {"before": args.before.resolve(), "after": ROOT}
    if not torch.cuda.is_available():
        runs = measured(trees, args.op_rounds, "ops")
        for row in runs["after"][0]:
            found = beside(runs, row)
            rows.add(row, **found, **interval(found["befores"], found["afters"]))
    runs = measured(trees, args.rounds, "models")
    for row in runs["after"][0]:
        rows.add(row, **beside(runs, row))


if __name__ == "__main__":
    main()
