"""Requests of mixed lengths through the engine, against one uniform batch of as many tokens; memory of many requests.

    python benchmarks/gpu_engine.py --out benchmarks/results/gpu_engine.json

Prompts have 16 to 240 tokens and answers 32 to 480, at random, all greedy and on random weights in bfloat16. The
uniform batch has a row for each slot: prompts of the mean length, read at once, and answers of the mean length, by
`generate()`; as many batches of it as have the tokens of all requests. "ratio" is the engine's time over that, of
medians of rounds that take turns. Where there are fewer slots than requests, they get them as they came, and in other
rows those with the longest answers first.

One more round is looked at from inside ("where"):

| value | |
|---|---|
| steps | rows of a step -> how many steps there were, and the milliseconds of one on the GPU (median) |
| steps_s | all of them together |
| longest_answer_s | the last steps, as many as its tokens: its own where all begin at once, and then the least time |
| passes, reading_s | how often prompts were read, and the GPU's seconds in that; most of it runs beside steps |
| joining_s, moving_s | states on their way to their slots |
| host_s, waiting_s | the engine's thread at work, and waiting for tokens: a GPU that is always busy makes it wait |

"narrow steps" compares both ways to compute a step of a few rows (`FEW_ROWS` of layers/stepping/stream.py): products by
tiles, and fused with what stands around them. The last row counts what many short requests leave: bytes of tensors on
the GPU, and of the process. Rows are written as they come; all of it takes about a minute and a half. `--tiny` is a
small model and few requests, for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longrecall import Engine
from longrecall.inference import step as stepping
from longrecall.inference.prompt_batches import PromptBatches
from longrecall.inference.slots import RecordedSlots, SlotStep
from longrecall.models.config import RecurrentConfig
from longrecall.models.description import read_description
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.serving.reading import PromptReader
from longrecall.serving.waiting import ARRIVAL, ORDERS
from longrecall.serving.worker import Worker

sys.path.insert(0, str(Path(__file__).parent))
from cpu_timing import peak_rss
from gpu_timing import Rows, median_ms

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
MODELS = ("gated_delta_net_400m",)
TINY = {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16}

Work = list[tuple[list[int], int]]
"""Prompts, and tokens of their answers."""


def requests_of(count: int, vocabulary: int, scale: float, seed: int = 0) -> Work:
    chance = random.Random(seed)

    def one() -> tuple[list[int], int]:
        prompt = [chance.randrange(vocabulary) for _ in range(max(1, round(scale * chance.randint(16, 240))))]
        return prompt, max(2, round(scale * chance.randint(32, 480)))

    return [one() for _ in range(count)]


def synchronised() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def by_engine(engine: Engine, work: Work) -> tuple[float, int]:
    """Seconds, and tokens written."""
    start = synchronised()
    requests = [engine.submit(prompt, max_new_tokens=count, ignore_end=True) for prompt, count in work]
    written = sum(len(request.result().ids) for request in requests)
    return synchronised() - start, written


def by_batches(model: RecurrentLM, work: Work, slots: int) -> float:
    """Seconds of uniform batches with as many tokens."""
    length = round(sum(len(prompt) for prompt, _ in work) / len(work))
    answer = sum(count for _, count in work) / len(work)
    new, batches = round(answer), len(work) / slots
    ids = torch.randint(0, model.config.vocab_size, (slots, length), device=model.device)
    start = synchronised()
    model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
    return (synchronised() - start) * batches * answer / new


class Clock:
    """The host's and the GPU's seconds in some work."""

    def __init__(self) -> None:
        self.host: list[float] = []
        self.events: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        on_gpu = torch.cuda.is_available()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)
        start = time.perf_counter()
        if begin is not None:
            begin.record()
        yield
        if end is not None:
            end.record()
        self.host.append(time.perf_counter() - start)
        self.events.append((begin, end))

    def ms(self) -> list[float]:
        """Milliseconds of each run: of the GPU, where there is one."""
        if not torch.cuda.is_available():
            return [1e3 * seconds for seconds in self.host]
        return [begin.elapsed_time(end) for begin, end in self.events]


@contextmanager
def looked_at(kind: type, name: str, clock: Callable[..., Clock]) -> Iterator[None]:
    """Time the calls of a method. `clock`: of the instance and the arguments."""
    whole = getattr(kind, name)

    def timed(self: Any, *args: Any) -> Any:
        with clock(self, *args).running():
            return whole(self, *args)

    setattr(kind, name, timed)
    try:
        yield
    finally:
        setattr(kind, name, whole)


def where_time_went(engine: Engine, work: Work) -> dict[str, Any]:
    """One round, looked at from inside."""
    steps: dict[int, Clock] = defaultdict(Clock)
    others: dict[str, Clock] = defaultdict(Clock)
    widths: list[int] = []

    def width(slots: Any, rows: int) -> Clock:
        widths.append(slots.count_for(rows))
        return steps[widths[-1]]

    def other(name: str) -> Callable[..., Clock]:
        return lambda *_: others[name]

    on_gpu = torch.cuda.is_available()
    slots: type = SlotStep if on_gpu else RecordedSlots
    reader: type = PromptBatches if on_gpu else PromptReader
    with (
        looked_at(slots, "decode", width),
        looked_at(slots, "join", other("joining")),
        looked_at(slots, "move", other("moving")),
        looked_at(reader, "read", other("reading")),
        looked_at(Worker, "work", other("work")),
        looked_at(torch.cuda.Event, "synchronize", other("waiting")),
    ):
        seconds, _ = by_engine(engine, work)
        synchronised()
    ms = {rows: clock.ms() for rows, clock in steps.items()}
    typical = {rows: statistics.median(found) for rows, found in ms.items()}
    waiting = sum(others["waiting"].host)
    return {
        "seconds": seconds,
        "steps": {rows: [len(ms[rows]), round(typical[rows], 3)] for rows in sorted(ms, reverse=True)},
        "steps_s": sum(map(sum, ms.values())) / 1e3,
        "longest_answer_s": sum(typical[rows] for rows in widths[-max(count for _, count in work) :]) / 1e3,
        "passes": len(others["reading"].host),
        **{f"{name}_s": sum(others[name].ms()) / 1e3 for name in ("reading", "joining", "moving")},
        "host_s": sum(others["work"].host) - waiting,
        "waiting_s": waiting,
    }


def narrow_steps(model: RecurrentLM) -> dict[str, Any]:
    """Milliseconds of steps of few rows: products by tiles, and fused with what stands around them."""
    found: dict[str, Any] = {}
    usual = stepping.FEW_ROWS
    try:
        for rows in (2, 4, 8):
            for name, most in (("tiles", 0), ("fused", rows)):
                stepping.FEW_ROWS = most
                step = stepping.DecodingStep(model, rows)
                step.capture()
                found[f"{rows}_rows_{name}_ms"] = median_ms(step)
    finally:
        stepping.FEW_ROWS = usual
    return found


def compare(model: RecurrentLM, work: Work, slots: int, rounds: int, order: str) -> dict[str, Any]:
    engine_s, uniform_s, written = [], [], 0
    with Engine(model, slots=slots, queue=len(work), prefix_bytes=0, order=order) as engine:
        for turn in range(rounds + 1):
            seconds, written = by_engine(engine, work)
            uniform = by_batches(model, work, slots)
            if turn:  # the first one compiles and captures
                engine_s.append(seconds)
                uniform_s.append(uniform)
        where = where_time_went(engine, work)
    ours, uniform = statistics.median(engine_s), statistics.median(uniform_s)
    return {
        "slots": slots,
        "order": order,
        "requests": len(work),
        "new_tokens": written,
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "engine_s": ours,
        "uniform_s": uniform,
        "ratio": ours / uniform,
        "tokens_per_s": written / ours,
        "where": where,
    }


def memory(model: RecurrentLM, count: int, slots: int) -> dict[str, Any]:
    """What so many requests leave, after a tenth of them as a beginning."""
    work = [(prompt[:8], 4) for prompt, _ in requests_of(count, model.config.vocab_size, 0.1)]
    on_gpu = torch.cuda.is_available()
    with Engine(model, slots=slots, queue=count) as engine:
        by_engine(engine, work[: count // 10])
        gc.collect()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        resident = peak_rss()
        seconds, _ = by_engine(engine, work)
        gc.collect()
        after = torch.cuda.memory_allocated() if on_gpu else 0
    grown = int((peak_rss() - resident) * 2**20)
    return {"requests": count, "seconds": seconds, "gpu_bytes": after - before, "process_bytes": grown}


def built(name: str) -> RecurrentLM:
    if name == "tiny":
        config = RecurrentConfig(vocab_size=64, hidden_size=32, layers=[{"mixer": TINY, "mlp_size": 24}] * 2)
        return RecurrentLM(config).eval()
    with torch.device("cuda"):
        model = RecurrentLM(read_description(CONFIGS / f"{name}.json"))
    return model.to(torch.bfloat16).eval()


def cases_of(slots: list[int], requests: int) -> list[tuple[int, str]]:
    """Numbers of slots, and in which order requests get them; no order where there are slots for all."""
    return [(count, order) for count in slots for order in ORDERS if count < requests or order == ARRIVAL]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slots", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--tiny", action="store_true", help="a small model and few requests")
    args = parser.parse_args(argv)
    if args.tiny:
        args.models, args.requests, args.slots, args.rounds, args.many = ["tiny"], 12, [4], 1, 40
    torch.manual_seed(0)
    rows = Rows("gpu_engine", args.out)
    for name in args.models:
        model = built(name)
        work = requests_of(args.requests, model.config.vocab_size, 0.1 if args.tiny else 1.0)
        for slots, order in cases_of(args.slots, len(work)):
            named = f"{name}, {slots} slots" + (f", {order} first" if order != ARRIVAL else "")
            rows.measure(named, lambda: compare(model, work, slots, args.rounds, order))  # noqa: B023
        if torch.cuda.is_available():
            rows.measure(f"{name}, narrow steps", lambda: narrow_steps(model))  # noqa: B023
        rows.measure(f"{name}, memory", lambda: memory(model, args.many, args.slots[0]))  # noqa: B023


if __name__ == "__main__":
    main()
