"""Our kernels beside those of other packages on one GPU, through the backends that dispatch would choose from.

    python benchmarks/gpu_peers.py --out benchmarks/results/gpu_peers.json
    python benchmarks/gpu_peers.py --table benchmarks/results/gpu_peers.json     # the rows of ops/peers.MEASURED

Every time includes what our contract costs a peer: rounding, repeated keys, initial and final states. bfloat16, medians
of CUDA events; peaks count what is allocated before. Errors are relative, against the step-by-step definition in
float64 on shorter sequences. "ours" is what dispatch takes without peers. fla runs its own kernels (FLA_FLASH_QLA=0).
Kernels are compiled first, by processes side by side. What fails or takes too long is a row with its error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import dispatch, peers
from longrecall.ops.subheads import subhead_delta_rule

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows, median_ms, peak_gib

OPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gated_delta_rule": dispatch.gated_delta_rule,
    "gated_linear_attention": dispatch.gated_linear_attention,
    "subhead_delta_rule": subhead_delta_rule,
}
SLACK = 2.0
"""A peer whose error is at most this many times ours is as good ..."""
GOOD = 0.01
"""... and so is one with an error of at most this: bfloat16 keeps 8 bits."""
SHARDS = 3
"""Processes that share the configurations which one op of a peer tries."""


@dataclass(frozen=True)
class Case:
    """One call: `key_heads` keys, `heads` states a row, values of heads / subheads of them."""

    op: str
    decay: str
    rows: int
    length: int
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    subheads: int = 1

    @property
    def name(self) -> str:
        """What a row is called."""
        shape = f"{self.rows}x{self.length} {self.key_heads}/{self.heads} x ({self.key_width}, {self.value_width})"
        return f"{self.op}, decay {self.decay}, {shape}" + (f" E={self.subheads}" if self.subheads > 1 else "")

    @property
    def kind(self) -> tuple[Any, ...]:
        """What kernels are compiled for."""
        return (self.op, self.decay, self.key_heads, self.heads, self.key_width, self.value_width, self.subheads)

    def inputs(self, strong: bool = False) -> dict[str, Tensor]:
        """Random inputs in bfloat16, gates and state in float32; `strong`: decays from none to e^-20 a token."""
        g = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device="cuda")

        tokens = (self.rows, self.length)
        keys = (*tokens, self.key_heads, self.key_width)
        values = randn(*tokens, self.heads // self.subheads, self.value_width).bfloat16()
        found = {"q": randn(*keys).bfloat16(), "k": F.normalize(randn(*keys), dim=-1).bfloat16(), "v": values}
        if self.decay != "none":
            gates = randn(*(keys if self.decay == "channel" else (*tokens, self.heads)))
            mild = F.logsigmoid(gates) / 16
            found["log_decay"] = -(2 * gates - 3).exp().clamp(max=20) if strong else mild
        if "delta" in self.op:
            found["beta"] = torch.rand(*tokens, self.heads, generator=g, device="cuda")
        found["initial_state"] = randn(self.rows, self.heads, self.key_width, self.value_width)
        return found

    def call(self, tensors: dict[str, Tensor], backend: str | None) -> tuple[Tensor, Tensor]:
        """Outputs and final state; backend None = ours."""
        log_decay = tensors.get("log_decay")
        with peers.left_out():
            return OPS[self.op](**{**tensors, "log_decay": log_decay}, backend=backend)


DELTA, LINEAR = "gated_delta_rule", "gated_linear_attention"
CASES = (
    Case(DELTA, "head", 8, 4096, 8, 8, 128, 128),
    Case(DELTA, "head", 1, 4096, 8, 8, 128, 128),
    Case(DELTA, "head", 1, 32768, 8, 8, 128, 128),
    Case(DELTA, "head", 8, 4096, 64, 64, 128, 128),
    Case("subhead_delta_rule", "head", 8, 4096, 64, 64, 128, 128, 8),
    Case(DELTA, "head", 8, 4096, 16, 16, 64, 64),
    Case(DELTA, "none", 8, 4096, 8, 8, 128, 128),
    Case(LINEAR, "head", 8, 4096, 1, 64, 128, 64),
    Case(LINEAR, "channel", 8, 4096, 4, 4, 256, 512),
    Case(LINEAR, "channel", 1, 4096, 4, 4, 256, 512),
    Case(DELTA, "channel", 8, 4096, 8, 8, 128, 128),
)


class TooSlow(Exception):
    """A row took longer than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds: between two steps of Python, not inside one."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"not done after {max(seconds, 0):.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def step(case: Case, backend: str | None, gradients: bool) -> Callable[[], Any]:
    """One forward without gradients, or forward and backward, of a case."""
    tensors = {name: x.requires_grad_(gradients) for name, x in case.inputs().items()}

    def forward() -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(gradients):
            return case.call(tensors, backend)

    if not gradients:
        return forward
    leaves, (out, final) = list(tensors.values()), forward()
    upstream = [torch.randn_like(out), torch.randn_like(final)]
    del out, final
    return lambda: torch.autograd.grad(forward(), leaves, upstream)


def timing(case: Case, backend: str | None, gradients: bool, seconds: float) -> dict[str, Any]:
    """Median milliseconds and peak GiB, with what `table` needs to know of the call."""
    with at_most(seconds):
        work = step(case, backend, gradients)
        values = {"ms": median_ms(work, repeats=15, warmup=3), "peak_gib": peak_gib(work)}
    return {**facts(case), "backend": backend or "ours", "gradients": gradients, **values}


def facts(case: Case) -> dict[str, Any]:
    """The case as `ops/peers.describe` sees it."""
    sharing = case.subheads if case.op == "subhead_delta_rule" else case.heads // case.key_heads
    return {"case": asdict(case), "dtype": "bfloat16", "sharing": sharing, "states": case.rows * case.heads}


def results(case: Case, tensors: dict[str, Tensor], backend: str | None, gradients: bool) -> dict[str, Tensor]:
    """Outputs, final state and, if asked for, every gradient under a fixed upstream gradient, in float64."""
    leaves = {name: x.clone().requires_grad_(gradients) for name, x in tensors.items()}
    out, final = case.call(leaves, backend)
    named = {"out": out, "state": final}
    if gradients:
        g = torch.Generator("cuda").manual_seed(1)
        upstream = [torch.randn(x.shape, generator=g, device="cuda").bfloat16().to(x.dtype) for x in (out, final)]
        found = torch.autograd.grad([out, final], list(leaves.values()), upstream)
        named |= {f"d_{name}": x for name, x in zip(leaves, found, strict=True)}
    return {name: x.detach().double() for name, x in named.items()}


def accuracy(case: Case, backend: str | None, strong: bool, gradients: bool, seconds: float) -> dict[str, Any]:
    """Relative errors of outputs, final state and gradients against the definition in float64; `worst` of them."""
    with at_most(seconds):
        tensors = case.inputs(strong)
        exact = {name: x.double() for name, x in tensors.items()}
        # The loop over tokens where it is short and its states few; else the same in chunks.
        definition = "reference" if case.length < 1000 and case.heads <= 16 else "chunked"
        wanted = results(case, exact, definition, gradients)
        found = results(case, tensors, backend, gradients)
        errors = {name: float((found[name] - x).norm() / x.norm()) for name, x in wanted.items()}
    # max() may pass over a NaN.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    row = {**facts(case), "backend": backend or "ours", "gradients": gradients, **errors}
    return {**row, "worst": errors[worst], "worst_of": worst}


def served(case: Case) -> list[str]:
    """Peers that run here and know the op."""
    rule = DELTA if case.op == "subhead_delta_rule" else case.op
    here = {name: peer for name, peer in peers.PEERS.items() if peers.unavailable(name) is None}
    return [name for name, peer in here.items() if (rule, case.decay) in peer.functions]


def compile_first(seconds: float, processes: int) -> None:
    """Every kernel of every case compiled into the caches on disk by processes side by side, for at most `seconds`."""
    # What compiles longest goes first: fla, once for each kind; a layer's subheads are its 64 heads.
    kinds = {case.kind: n for n, case in reversed(list(enumerate(CASES))) if case.op != "subhead_delta_rule"}
    kinds = {kind: n for kind, n in kinds.items() if "fla" in served(CASES[n])}
    waiting = [(n, "fla", shard) for n in sorted(kinds.values()) for shard in range(SHARDS)]
    waiting += [(n, "flash_qla", 0) for n, case in enumerate(CASES) if "flash_qla" in served(case)]
    waiting += [(n, "ours", 0) for n in range(len(CASES))]
    # fla's tuning there means nothing: its results are not kept.
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    running: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < processes:
            n, backend, shard = waiting.pop(0)
            words = [sys.executable, __file__, "--compile", str(n), "--backend", backend, "--shard", str(shard)]
            running.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.1)
    took = seconds - (end - time.monotonic())
    print(f"compiling took {took:.0f} s; processes not done: {len(running) + len(waiting)}", flush=True)
    for process in running:
        process.kill()
        process.wait()


def compile_one(case: Case, backend: str, shard: int) -> None:
    """Run a case once; of the configurations that an op of fla tries, only every SHARDS-th, and none is timed."""
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def with_fewer(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        original(self, fn, names, configs[shard::SHARDS] or configs[:1], *rest, **more)

    def once(work: Callable[[], Any], **_: Any) -> list[float]:
        work()
        return [1.0, 1.0, 1.0]

    if backend == "fla":
        Autotuner.__init__ = with_fewer
        testing.do_bench = once
    for gradients in (False, True):
        try:
            step(case, None if backend == "ours" else backend, gradients)()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{case.name}, {backend}, gradients {gradients}: {error}", file=sys.stderr)


def shorter_tuning() -> None:
    """Triton's tuning, which takes an eighth of a second for each configuration, in a fifth of the time."""
    from triton import testing

    testing.do_bench = functools.partial(testing.do_bench, warmup=5, rep=20)


def measure(rows: Rows, deadline: float) -> None:
    """Times of every case, errors of every kind, then attention and whole layers beside."""

    def left() -> float:
        return min(20.0, deadline - time.monotonic())

    for case in CASES:
        for backend in (None, *served(case)):
            for gradients in (False, True):
                what = "forward and backward" if gradients else "forward"
                work = functools.partial(timing, case, backend, gradients, left())
                rows.measure(f"{case.name}: {what}, {backend or 'ours'}", work)
            torch.cuda.empty_cache()
    seen = set()
    for case in CASES:
        short = (1, 4096) if case.rows == 1 else (2, 449)
        small = Case(**{**asdict(case), "rows": short[0], "length": short[1]})
        for backend in () if small in seen else (None, *served(case)):
            for strong, gradients in ((False, False), (False, True), (True, False), (True, True)):
                if strong and case.decay == "none":
                    continue
                which = f"{'strong' if strong else 'mild'} decays, {'with' if gradients else 'without'} gradients"
                work = functools.partial(accuracy, small, backend, strong, gradients, left())
                rows.measure(f"errors of {small.name}: {which}, {backend or 'ours'}", work)
        seen.add(small)
        torch.cuda.empty_cache()
    beside(rows, left)


def beside(rows: Rows, left: Callable[[], float]) -> None:
    """Softmax attention of the same width, and whole layers of d 1024 with 8 heads of 128 at 8 x 4096."""
    import gpu_delta

    q, k, v = (torch.randn(8, 8, 4096, 128, device="cuda").bfloat16() for _ in range(3))
    for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.CUDNN_ATTENTION):

        def attention(backend: Any = backend) -> dict[str, Any]:
            def forward() -> Tensor:
                with torch.nn.attention.sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            with at_most(left()):
                return gpu_delta.timed(forward, [q, k, v])

        rows.measure(f"softmax attention 8x4096 8 x 128, {backend.name}", attention)
    layer = mixer_config({"type": "attention", "num_heads": 8, "head_dim": 128}).build(1024).cuda().bfloat16()
    x, position = torch.randn(8, 4096, 1024, device="cuda").bfloat16(), torch.zeros(8, dtype=torch.long, device="cuda")
    forward = lambda: layer(x, None, mask=None, position=position)[0]  # noqa: E731
    rows.measure("layer, softmax attention", lambda: gpu_delta.timed(forward, [x, *layer.parameters()]))
    for factor in (1, 8):
        if left() > 5:
            gpu_delta.layers(rows, (8, 4096), [factor])


def table(result: dict[str, Any]) -> list[str]:
    """The lines of `ops/peers.MEASURED` that a recorded run stands for."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    errors: dict[tuple[Any, ...], float] = {}
    for row in result["rows"]:
        if "case" not in row:
            continue
        c = row["case"]
        kind = (c["op"], c["decay"], row["dtype"], c["key_width"], c["value_width"], row["sharing"], row["gradients"])
        if "ms" in row:
            times.setdefault((*kind, row["states"], c["length"]), {})[row["backend"]] = row["ms"]
        else:
            key, error = (*kind, row["backend"]), row["worst"]
            errors[key] = max(errors.get(key, 0.0), error if error == error else float("inf"))
    winners: dict[tuple[Any, ...], tuple[str, ...]] = {}
    for key, found in times.items():
        kind, ours = key[:7], found.get("ours")
        if ours is not None:
            limit = max(GOOD, SLACK * errors.get((*kind, "ours"), 0.0))
            right = {name for name in found if errors.get((*kind, name), float("inf")) <= limit}
            fast = [name for name in sorted(found, key=lambda name: found[name]) if found[name] <= peers.MARGIN * ours]
            winners[key] = tuple(name for name in fast if name in right)
    lines = []
    for key, names in winners.items():
        # Where no peer ever wins, no row is needed; elsewhere those where we win hold them back.
        if any(won for other, won in winners.items() if other[:7] == key[:7]):
            op, decay, dtype, *numbers = key
            shown = ", ".join(map(repr, numbers))
            lines.append(
                f"    Measured({json.dumps(op)}, {json.dumps(decay)}, torch.{dtype}, {shown}, {_tuple(names)}),"
            )
    return lines


def _tuple(names: tuple[str, ...]) -> str:
    return "(" + ", ".join(map(json.dumps, names)) + ("," if len(names) == 1 else "") + ")"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a recorded run, measure nothing")
    parser.add_argument("--seconds", type=float, default=115.0, help="end after so many [%(default)s]")
    parser.add_argument("--compile-seconds", type=float, default=55.0, help="of them for compiling [%(default)s]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile [%(default)s]")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table is not None:
        print("\n".join(table(json.loads(args.table.read_text()))))
        return
    os.environ["FLA_FLASH_QLA"] = "0"
    if args.compile is not None:
        compile_one(CASES[args.compile], args.backend, args.shard)
        return
    deadline = time.monotonic() + args.seconds
    compile_first(args.compile_seconds, args.processes)
    shorter_tuning()
    rows = Rows("gpu_peers", args.out)
    for name in peers.PEERS:
        rows.add(f"backend {name}", reason=peers.unavailable(name))
    measure(rows, deadline)
    print("\n".join(table(rows.result)))


if __name__ == "__main__":
    main()
