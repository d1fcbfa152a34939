"""The speeds that a rebuild of the code must keep: this checkout beside another one, in one run on one machine.

    git worktree add ../before 6c26994
    python benchmarks/before_after.py --before ../before --out benchmarks/results/gpu_before_after.json

On a GPU: bfloat16, medians of CUDA events. Both trees are measured in processes of their own (`--measure` is such a
process), in turns: before, after, after, before, and so on. A row has the median of every process, the median of those,
and the ratio after/before.

On a CPU: processor milliseconds of one thread, of every process the least. Noise only adds to a time. The same code
differs by 30% from one process to the next all the same: other programs slow it down for seconds, and where its memory
lies decides how often the allocator gives pages back and takes them again. The rows of ops and of training, which make
the same tensors in the same order in both trees, therefore come from processes that import both trees and call them in
turns (`--together` is such a process). Neighbouring calls meet the same machine and the same memory. Such a row has:

- `befores`, `afters`, `before_ms`, `after_ms`: the least time of every process, and the medians of those.
- `ratios`, `ratio`: of every process the median of the ratios of neighbouring calls, and the median of those. This, not
  the quotient of the two times, says which tree is faster.
- `ratio_low`, `ratio_high`: an interval of that median: 95% of all draws of as many processes, with repetition.

Decoding and reading take other memory in one tree than in another, which belongs to their cost: their rows come from
processes with one tree, as those of a GPU do. Rows of memory are in MiB: the largest resident set after a call over
262,144 tokens with the last logits, less that after one over 4,096, in a process of its own. Only what both trees offer
is used: ops, layers, models and `generate()`'s captured parts.
"""

from __future__ import annotations

import argparse
import contextlib
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
from types import ModuleType
from typing import Any, TypeVar

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


class Tree:
    """A checkout's longrecall, imported beside another one's in the same process."""

    def __init__(self, place: Path) -> None:
        self._path, self._modules = str(place / "src"), dict[str, ModuleType]()

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """Within the block, `import longrecall` is an import from this tree."""
        aside = _longrecall_modules()
        sys.modules.update(self._modules)
        sys.path.insert(0, self._path)
        try:
            yield
        finally:
            self._modules = _longrecall_modules()
            sys.modules.update(aside)
            sys.path.remove(self._path)


def _longrecall_modules() -> dict[str, ModuleType]:
    """Take longrecall's modules out of those that are imported."""
    names = [name for name in sys.modules if name.partition(".")[0] == "longrecall"]
    return {name: sys.modules.pop(name) for name in names}


Work = Callable[[], Any]


def compare(works: dict[Tree, Work], calls: int) -> tuple[list[float], float]:
    """The least milliseconds of processor time of two works, and the ratio of the second to the first.

    They are called in turns, first, second, second, first, and so on. The ratio is the median of those of neighbours.
    """
    times: dict[Tree, list[float]] = {tree: [] for tree in works}
    # The first calls choose kernels and take memory.
    for tree in [*works, *in_turns(list(works), calls)]:
        with tree.imported():
            began = time.process_time()
            works[tree]()
            times[tree].append(1e3 * (time.process_time() - began))
    first, second = (taken[1:] for taken in times.values())
    return [min(first), min(second)], statistics.median(b / a for a, b in zip(first, second, strict=True))


def cpu_works() -> dict[str, tuple[Work, int]]:
    """What is timed beside another tree, by the longrecall that is imported: name -> work, how many calls of it."""
    import torch

    from longrecall.ops import gated_delta_rule, gated_linear_attention

    q, k, v = (torch.randn(1, 2048, 4, 64, requires_grad=True) for _ in range(3))
    decay, beta = -torch.rand(1, 2048, 4), torch.rand(1, 2048, 4)

    def linear() -> None:
        gated_linear_attention(q, k, v, decay)[0].sum().backward()

    def delta() -> None:
        gated_delta_rule(q, torch.nn.functional.normalize(k, dim=-1), v, decay, beta)[0].sum().backward()

    model, ids = base_model("Mamba-2 base"), torch.randint(0, 256, (4, 512))
    return {
        "gated linear attention, forward + backward": (linear, 31),
        "gated delta rule, forward + backward": (delta, 31),
        "Mamba-2 base, training step, 4 x 512": (lambda: model(ids, labels=ids).loss.backward(), 15),
    }


def together(before: Path, after: Path, first: str) -> dict[str, dict[str, float]]:
    """The rows that come from a process with both trees; the tree called `first` is imported and called first."""
    import torch

    torch.set_num_threads(1)
    trees = {"before": Tree(before), "after": Tree(after)}
    if first == "after":
        trees = dict(reversed(trees.items()))
    works: dict[Tree, dict[str, tuple[Work, int]]] = {}
    for tree in trees.values():
        torch.manual_seed(0)
        with tree.imported():
            works[tree] = cpu_works()
    found = {}
    for row, (_, calls) in works[trees["after"]].items():
        least, ratio = compare({tree: works[tree][row][0] for tree in trees.values()}, calls)
        found[row] = dict(zip(trees, least, strict=True)) | {"ratio": ratio if first == "before" else 1 / ratio}
    return found


def least_ms(work: Work, calls: int) -> float:
    """The least milliseconds of processor time of `work`, which runs once before."""
    work()
    times = []
    for _ in range(calls):
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return min(times)


def cpu_times() -> dict[str, float]:
    """Milliseconds of processor time: decoding and reading of the shipped bases."""
    import torch

    torch.set_num_threads(1)
    ids, text = torch.randint(0, 256, (1, 512)), torch.ones(1, 4096, dtype=torch.long)
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}
    for name in BASES:
        generate = partial(base_model(name).generate, ids, **options)
        found[f"{name}, generate() of 64 tokens"] = least_ms(generate, 9)
    model = base_model("Mamba-2 base")
    with torch.no_grad():
        found["Mamba-2 base, reading 1 x 4096"] = least_ms(lambda: model(text, logits_to_keep=1), 15)
    return found


def measure() -> dict[str, float]:
    """Milliseconds (or MiB) of the rows that come from a process with one tree, by the longrecall that is imported."""
    import torch

    torch.manual_seed(0)
    return layer_times() | model_times() if torch.cuda.is_available() else cpu_times() | cpu_memory()


def answer(command: Sequence[str], environment: dict[str, str], about: str) -> Any:
    """The JSON in the last line that this script prints for these arguments."""
    done = subprocess.run(
        [sys.executable, __file__, *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"measuring {about} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(tree: Path, site: str = "") -> dict[str, float]:
    """`measure` in a process that imports longrecall from `tree`, and what the folder `site` has from there."""
    path = os.pathsep.join(filter(None, (str(tree / "src"), site, os.environ.get("PYTHONPATH"))))
    found: dict[str, float] = answer(["--measure"], os.environ | {"PYTHONPATH": path}, str(tree))
    return found


def run_together(before: Path, first: str) -> dict[str, dict[str, float]]:
    """`together` in a process of its own, with this checkout as the tree after."""
    command = ["--together", first, "--before", str(before)]
    found: dict[str, dict[str, float]] = answer(command, os.environ | {"OMP_NUM_THREADS": "1"}, f"{before} beside this")
    return found


Runs = dict[str, list[dict[str, float]]]
"""What every process of each of two sides has measured, in the order of the rounds."""

Side = TypeVar("Side")


def in_turns(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """The side of the next process, or call: first, second, second, first, and so on."""
    for index in range(rounds):
        yield from sides if index % 2 == 0 else reversed(sides)


def measured(trees: dict[str, Path], rounds: int) -> Runs:
    """Measure the rows in `rounds` processes of each tree."""
    runs: Runs = {name: [] for name in trees}
    for name in in_turns(list(trees), rounds):
        runs[name].append(run(trees[name]))
        print(name, json.dumps(runs[name][-1]), flush=True)
    return runs


def beside(runs: Runs, row: str) -> dict[str, Any]:
    """The median of each side, their ratio after/before, and the values of all processes."""
    times = {name: [one[row] for one in found] for name, found in runs.items()}
    middle = {name: statistics.median(values) for name, values in times.items()}
    unit = "mib" if row.endswith(MEMORY) else "ms"
    numbers = {f"{name}_{unit}": value for name, value in middle.items()}
    return numbers | {"ratio": middle["after"] / middle["before"]} | {f"{k}s": v for k, v in times.items()}


def of_processes(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A row of a CPU from what each process has found of it (see above)."""
    times = {name: [one[name] for one in found] for name in ("before", "after")}
    ratios = [one["ratio"] for one in found]
    numbers = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    numbers |= {"ratio": statistics.median(ratios), **interval(ratios)}
    return numbers | {f"{k}s": v for k, v in times.items()} | {"ratios": ratios}


def interval(ratios: Sequence[float], draws: int = 10_000) -> dict[str, float]:
    """The middle 95% of the median of ratios that are drawn again, with repetition."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    least = round(0.025 * (draws - 1))
    return {"ratio_low": medians[least], "ratio_high": medians[-1 - least]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--commit", default="6c26994", help="its commit, for the record [%(default)s]")
    parser.add_argument("--rounds", type=int, default=4, help="processes of each tree [%(default)s]")
    parser.add_argument("--cpu-rounds", type=int, default=10, help="processes with both trees [%(default)s]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure what is imported, print JSON")
    parser.add_argument("--together", choices=("before", "after"), help="measure both in turns, this one first")
    parser.add_argument("--memory", choices=BASES, help="measure the memory of this base alone, print MiB")
    args = parser.parse_args()
    if args.memory:
        print(memory_of(args.memory))
        return
    if args.measure:
        print(json.dumps(measure()))
        return
    if args.before is None or not (args.before / "src" / "longrecall").is_dir():
        parser.error("--before: a checkout of longrecall")
    before = args.before.resolve()
    if args.together:
        print(json.dumps(together(before, ROOT, args.together)))
        return
    if min(args.rounds, args.cpu_rounds) < 1:
        parser.error("--rounds and --cpu-rounds: at least 1")
    import torch
    from gpu_timing import Rows

    rows = Rows("before_after", args.out)
    rows.result["before"] = args.commit
    if not torch.cuda.is_available():
        rows.result["statistic"] = (
            "times: least of a process; ratio, where there are ratios: median of neighbouring calls"
        )
        found = []
        for index in range(args.cpu_rounds):
            found.append(run_together(before, ("before", "after")[index % 2]))
            print(json.dumps(found[-1]), flush=True)
        for row in found[0]:
            rows.add(row, **of_processes([one[row] for one in found]))
    runs = measured({"before": before, "after": ROOT}, args.rounds)
    for row in runs["after"][0]:
        rows.add(row, **beside(runs, row))


if __name__ == "__main__":
    main()
