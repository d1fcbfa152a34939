"""`longrecall bench`: how fast a checkpoint, or the recurrences themselves, run on this machine."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from longrecall.checkpoint_place import local_folder
from longrecall.errors import UserError, ran_out_of_memory
from longrecall.units import parse_length

if TYPE_CHECKING:
    import torch

    from longrecall.models.state import RecurrentState
    from longrecall.ops.backends import Backend

HELP = "measure how many tokens per second a checkpoint, or the recurrences alone, process on this machine"
EXAMPLE = (
    "longrecall bench bigger/ --length 2k --batch 1\n  longrecall bench ops --length 512 --heads 4 --dim 64 --json"
)
_MOST = 2**31 - 1
"""Of any count: what torch takes for its threads, and more than any machine has room for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument(
        "target", metavar="CKPT|ops", help="a checkpoint folder or hub id, or the word ops for the recurrences alone"
    )
    parser.add_argument("--length", default="512", metavar="N", help="tokens per sequence: 512, 4k [%(default)s]")
    parser.add_argument("--batch", type=int, default=1, help="sequences processed together [%(default)s]")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs, of which the median is shown [%(default)s]")
    parser.add_argument(
        "--decode-tokens", type=int, default=32, help="tokens generated, one at a time, per timed run [%(default)s]"
    )
    parser.add_argument("--heads", type=int, default=4, help="with ops: number of heads [%(default)s]")
    parser.add_argument("--dim", type=int, default=64, help="with ops: key and value channels per head [%(default)s]")
    parser.add_argument("--dtype", help="number format: float32, bfloat16, float16 [as stored; float32 for ops]")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 [cuda if there is one, else cpu]")
    parser.add_argument("--threads", type=int, help="CPU threads [PyTorch's own choice]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table (or JSON), return the exit code."""
    length = parse_length(args.length)
    for name in ("batch", "repeats", "decode_tokens", "heads", "dim", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if value is not None and value > _MOST:
            raise UserError(f"--{name.replace('_', '-')} must be at most {_MOST:,}, got {value}")
    if args.target != "ops":
        local_folder(args.target)  # a wrong name is said at once, not after torch was imported
    import torch

    from longrecall.evaluation.results import environment
    from longrecall.models.loading import preferred_device

    args.device = preferred_device(args.device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(args.threads or threads)
        rows = bench_ops(args, length) if args.target == "ops" else bench_checkpoint(args, length)
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    settings = {"length": length, "batch": args.batch, "repeats": args.repeats, "device": args.device, "threads": used}
    if args.target == "ops":
        settings |= {"heads": args.heads, "dim": args.dim}
    facts = {"target": args.target, "environment": environment(args.device), "settings": settings, "results": rows}
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def bench_checkpoint(args: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """Return times of a checkpoint's forward pass, forward and backward pass, and one-token steps."""
    import torch

    import longrecall

    model = longrecall.load(args.target, dtype=args.dtype, device=args.device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (args.batch, length), generator=generator).to(model.device)

    def forward() -> None:
        with torch.inference_mode():
            model(ids, use_cache=False, logits_to_keep=1)

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()

    states: list[RecurrentState] = []

    def decode() -> None:
        with torch.inference_mode():
            if not states:  # in the first run, which is not timed
                states.append(model(ids, logits_to_keep=1).past_key_values)
            current = states[0]
            for _ in range(args.decode_tokens):
                current = model(ids[:, :1], past_key_values=current).past_key_values

    tokens = args.batch * length
    steps = (("forward", forward, tokens), ("decode", decode, args.batch * args.decode_tokens))
    rows = [{"what": name, **_measure(step, count, args.repeats, model.device)} for name, step, count in steps]
    trained = {"what": "forward+backward", **_measure(forward_backward, tokens, args.repeats, model.device)}
    return [rows[0], trained, rows[1]]


def bench_ops(args: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """Return times of every op on every backend, each with its ratio to the step-by-step reference."""
    import torch
    from torch.nn import functional as F

    from longrecall.models.loading import parse_dtype
    from longrecall.ops import BACKENDS, gated_delta_rule, gated_linear_attention

    dtype = parse_dtype(args.dtype) or torch.float32
    try:
        device = torch.device(args.device)
        generator = torch.Generator(device).manual_seed(0)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'device "{args.device}" cannot be used: {str(error).splitlines()[0]}') from None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    batch, heads, dim = args.batch, args.heads, args.dim
    shape = (batch, length, heads, dim)
    q, v = random(*shape), random(*shape)
    k = F.normalize(random(*shape), dim=-1)
    per_channel, per_head = F.logsigmoid(random(*shape)) / 16, F.logsigmoid(random(*shape[:3]))
    beta = random(*shape[:3]).sigmoid()
    cases: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        ("gated_linear_attention, decay per channel", gated_linear_attention, (q, k, v, per_channel)),
        ("gated_linear_attention, decay per head", gated_linear_attention, (q, k, v, per_head)),
        ("gated_delta_rule", gated_delta_rule, (q, k, v, per_head, beta)),
    ]
    rows: list[dict[str, Any]] = []
    for name, op, tensors in cases:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        named: dict[str, torch.Tensor | None] = dict(zip(("q", "k", "v", "log_decay", "beta"), inputs, strict=False))
        usable = [key for key, b in BACKENDS.items() if not b.kernels or _serves(b, device, op.__name__, named)]
        for backward in (False, True):
            what = "forward+backward" if backward else "forward"
            for backend in usable:
                step = _op_step(op, inputs, backend, backward)
                timed = _measure(step, batch * length, args.repeats, device)
                rows.append({"op": name, "what": what, "backend": backend, **timed})
    return [row | {"times_reference": _times_reference(rows, row)} for row in rows]


def _serves(backend: Backend, device: torch.device, op: str, inputs: dict[str, torch.Tensor | None]) -> bool:
    return device.type == "cuda" and backend.why_not(op, inputs) is None


def _op_step(
    op: Callable[..., Any], inputs: Sequence[torch.Tensor], backend: str, backward: bool
) -> Callable[[], None]:
    import torch

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out, final = op(*inputs, backend=backend)
            if backward:
                torch.autograd.grad(out.float().sum() + final.sum(), inputs)

    return step


def _times_reference(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> float | None:
    same = (r for r in rows if (r["op"], r["what"], r["backend"]) == (row["op"], row["what"], "reference"))
    slow, fast = next(same)["milliseconds"], row["milliseconds"]
    return None if slow is None or fast is None else float(slow / fast)


def _measure(step: Callable[[], None], tokens: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return what `_times` does; where memory does not suffice, None for each number and an ``"error"`` beside them."""
    import torch

    try:
        return _times(step, tokens, repeats, device)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the failed run left must not fail the next one
    return {"milliseconds": None, "fastest": None, "tokens_per_second": None, "error": "out of memory"}


def _times(step: Callable[[], None], tokens: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return the median and fastest time of `step` in milliseconds, and tokens per second at the median."""
    import torch

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1000 * (time.perf_counter() - start)

    once()  # warms caches, allocators and kernels
    times = [once() for _ in range(repeats)]
    median = statistics.median(times)
    return {"milliseconds": median, "fastest": min(times), "tokens_per_second": 1000 * tokens / median}


def as_text(facts: dict[str, Any]) -> str:
    """Return the result as an aligned table."""
    from longrecall.tables import aligned

    ops = facts["target"] == "ops"
    header = ("op", "what", "backend", "ms", "tokens/s", "x reference") if ops else ("what", "ms", "tokens/s")
    rows = [header]
    for row in facts["results"]:
        names = (row["op"], row["what"], row["backend"]) if ops else (row["what"],)
        ratio = (_shown(row["times_reference"], ".2f"),) if ops else ()
        speed = _shown(row["tokens_per_second"], ",.0f")
        rows.append((*names, row.get("error") or _shown(row["milliseconds"], ".2f"), speed, *ratio))
    settings = ", ".join(f"{name} {value}" for name, value in facts["settings"].items())
    environment = ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
    return "\n".join([*aligned(rows, left=3 if ops else 1), "", settings, environment])


def _shown(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)
