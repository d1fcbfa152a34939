"""Processes of a context group, and what they find: ``python -m tests.context.ranks PORT [GPUS or kernels]``.

A process takes seconds to import everything, so one imports and becomes several by fork: four on a CPU (gloo), which
make a group of four ranks and two groups of two; or one for each GPU (NCCL), which try the kernels too; or, for
"kernels", two on a CPU in Triton's interpreter. Each rank computes the whole by itself and compares its piece.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longrecall.context import (
    ContextGroup,
    RowPieces,
    all_gather,
    context_parallel,
    from_ends,
    from_last,
    from_previous,
    hand_on,
    received,
    row_pieces,
    summed,
)
from longrecall.layers import fused_delta
from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops.backends import OPS
from longrecall.ops.execution import as_states_are_read_now, context, padding_at_the_end
from tests.interpreter import quicken
from tests.ops.contract import TABLE, Row
from tests.processes import PATIENCE, on_processes

CLOSE = {torch.float64: 1e-11, torch.float32: 1e-4}
"""Dtype -> norm of an error over the norm: sums of a few hundred terms, cut at other places. float32 is for kernels,
which multiply in three products of tensor-float-32."""

ARGUMENTS = sys.argv[1:] if __name__ == "__main__" else []
GPUS = int(ARGUMENTS[0]) if ARGUMENTS not in ([], ["kernels"]) else 0
INTERPRETED = ARGUMENTS == ["kernels"]
"""Whether layers are run in kernels, by Triton's interpreter."""
PROCESSES = GPUS or (2 if INTERPRETED else 4)
DEVICE = "cuda" if GPUS else "cpu"

LENGTHS = {"reference": ((2, 3), (1, 17)), "chunked": ((1, 41), (3, 16)), "triton": ((1, 150), (2, 37))}
"""Backend -> rows of the batch and tokens of a piece."""

OPERATIONS = {name: row for name, row in TABLE.items() if row.state == "initial_state"}
"""Every op that begins from a state and returns one, in each of the ways to call it."""

Case = Callable[[ContextGroup, torch.Generator], None]


def same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    error = (found - expected).norm() / expected.norm().clamp(min=1e-3)
    assert error < CLOSE[expected.dtype], (what, float(error))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().to(DEVICE).requires_grad_()


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE, dtype)


def previous(group: ContextGroup, g: torch.Generator) -> None:
    """Values come from the rank before, their gradients return to it, and the first rank's to its start."""
    every = normal(g, group.world, 2, 3)
    own, start = leaf(every[group.rank]), leaf(normal(g, 2, 3))
    found = from_previous(own, start)
    (found * (group.rank + 1)).sum().backward()
    same(found, start if group.first else every[group.rank - 1], "value")
    if group.world == 1:
        assert own.grad is None and start.grad is not None, "a rank alone sends nothing"
        return
    assert own.grad is not None and start.grad is not None
    same(own.grad, torch.full_like(own, 0 if group.last else group.rank + 2), "gradient of what was sent")
    same(start.grad, torch.full_like(own, group.first), "gradient of the start")


def gathered(group: ContextGroup, g: torch.Generator) -> None:
    every = normal(g, group.world, 2, 3)
    own = leaf(every[group.rank])
    found, total = all_gather(own), summed(own)
    same(found, every, "gathered")
    same(total, every.sum(0), "sum")
    (found * (group.rank + 1)).sum().backward()
    assert own.grad is not None
    same(own.grad, torch.full_like(own, group.world * (group.world + 1) / 2), "gradient of what was gathered")
    own.grad = None
    # All ranks compute the same term of the loss: their gradients together are its gradient.
    summed(own).square().sum().backward()
    assert own.grad is not None
    same(own.grad, 2 * every.sum(0), "gradient of the sum")


def chain(group: ContextGroup, g: torch.Generator, reentrant: bool | None) -> None:
    """A value that each rank changes, plain and in a part of the model that runs twice."""
    every = normal(g, group.world, 2, 3)
    start = normal(g, 2, 3)

    def step(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        after = before * x.cos() + x
        return before + after * x, after

    def piece(x: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
        return hand_on(*step(x, received(begin, x)))

    own, begin = leaf(every[group.rank]), leaf(start)
    run = piece if reentrant is None else as_states_are_read_now(piece)
    out, after = run(own, begin) if reentrant is None else checkpoint(run, own, begin, use_reentrant=reentrant)
    out, last = from_last(out, after)
    ((out * (group.rank + 1)).sum() + (last * group.rank).sum()).backward()
    pieces, first = [leaf(x) for x in every], leaf(start)
    state, loss = first, torch.zeros((), dtype=torch.float64, device=DEVICE)
    for rank, x in enumerate(pieces):
        read, state = step(x, state)
        loss = loss + (read * (rank + 1)).sum()
    (loss + sum((state * rank).sum() for rank in range(group.world))).backward()
    same(last, state, "last state")
    mine = pieces[group.rank].grad
    assert own.grad is not None and begin.grad is not None and mine is not None and first.grad is not None
    same(own.grad, mine, "gradient of the piece")
    same(begin.grad, first.grad if group.first else torch.zeros_like(start), "gradient of the start")


def operation(group: ContextGroup, g: torch.Generator, row: Row, backend: str, rows: int, length: int) -> None:
    """Outputs, final state and every gradient of an op; each rank weighs what it gets in its own way."""
    drawn = row.inputs(g, rows, group.world * length)
    dtype = torch.float32 if backend == "triton" else torch.float64
    whole = {name: None if x is None else leaf(x.to(dtype)) for name, x in drawn.items()}
    timeless = (*row.timeless, row.state)

    def cut(name: str, x: Tensor) -> Tensor:
        return x if name in timeless else x.chunk(group.world, dim=1)[group.rank]

    own = {name: None if x is None else leaf(cut(name, x)) for name, x in whole.items()}
    out, final = row.call(**own, backend=backend)
    out, final = from_last(out, final)
    with context_parallel(ContextGroup.alone()):
        expected, last = row.call(**whole, backend=backend)
    weights = normal(g, *expected.shape, dtype=dtype)
    shares = normal(g, group.world, *last.shape, dtype=dtype)
    ((out * cut("out", weights)).sum() + (final * shares[group.rank]).sum()).backward()
    ((expected * weights).sum() + (last * shares.sum(0)).sum()).backward()
    same(out, cut("out", expected), "outputs")
    same(final, last, "final state")
    for name, x in whole.items():
        if x is None or own[name] is None:
            continue
        mine = own[name].grad
        if name in timeless and name != row.state:
            dist.all_reduce(mine, group=group.process_group)
        gradient = cut(name, x.grad)
        same(mine, gradient if name != row.state or group.first else torch.zeros_like(gradient), f"gradient of {name}")


def documents(group: ContextGroup, g: torch.Generator, row: Row) -> None:
    """Documents that begin inside of pieces, at their borders, and one that reaches over three pieces."""
    length = 12
    total = group.world * length
    ends = [*(end for end in (0, 5, 12, 14, 21) if end < total - 2), total - 2, total]
    drawn = row.inputs(g, 1, total) | {"initial_state": row.inputs(g, len(ends) - 1, 1)["initial_state"]}
    whole = {name: None if x is None else leaf(x.double()) for name, x in drawn.items()}
    left, right = group.rank * length, (group.rank + 1) * length
    mine = [max(left, min(right, end)) - left for end in ends]
    inside = [index for index in range(len(ends) - 1) if mine[index] < mine[index + 1]]
    cuts = torch.tensor([*(mine[index] for index in inside), length], device=DEVICE)
    ended = [ends[index + 1] <= left + length for index in inside]
    places = (inside, ended, [0], [len(inside) - 1], [left not in ends])
    pieces = RowPieces(len(ends) - 1, *(torch.tensor(x, device=DEVICE) for x in places))
    timeless = (*row.timeless, "initial_state")

    def cut(name: str, x: Tensor) -> Tensor:
        if name == "initial_state":
            return x[inside]
        return x if name in timeless else x[:, left:right]

    own = {name: None if x is None else leaf(cut(name, x)) for name, x in whole.items()}
    with row_pieces(pieces):
        out, final = row.call(**own, cu_seqlens=cuts)
        out, final = from_ends(out, final)
    with context_parallel(ContextGroup.alone()):
        expected, last = row.call(**whole, cu_seqlens=torch.tensor(ends, device=DEVICE))
    weights, shares = normal(g, *expected.shape), normal(g, *last.shape)
    ((out * weights[:, left:right]).sum() + (final * shares).sum() / group.world).backward()
    ((expected * weights).sum() + (last * shares).sum()).backward()
    same(out, expected[:, left:right], "outputs")
    same(final, last, "final states")
    for name, x in whole.items():
        if x is None or own[name] is None:
            continue
        gradient, found = x.grad, own[name].grad
        if name == "initial_state":
            begun = [place for place, index in enumerate(inside) if ends[index] >= left]
            same(found[begun], gradient[[inside[place] for place in begun]], "gradient of the initial states")
            continue
        if name in timeless:
            dist.all_reduce(found, group=group.process_group)
        same(found, cut(name, gradient), f"gradient of {name}")


def kernels_of_a_layer(group: ContextGroup, g: torch.Generator, expansion: dict[str, Any] | None, padded: bool) -> None:
    """A layer whose convolutions, expansion and recurrence are one function in kernels; from a state, and padded."""
    width, length, rows, channels = 64 if GPUS else 16, 40 if GPUS else 17, 2, 24
    description = {"num_heads": 1, "value_heads": 2, "key_dim": width, "value_dim": width, "output_gate": False}
    more = {} if expansion is None else {"expansion": expansion}
    config = mixer_config({"type": "gated_delta_net", **description, **more})
    torch.manual_seed(5)
    layer = config.build(channels).to(DEVICE)
    shapes = {name: (rows, *shape) for name, shape in config.state_shapes().items()}
    whole = leaf(normal(g, rows, group.world * length, channels, dtype=torch.float32))
    states = {name: normal(g, *shape, dtype=torch.float32) for name, shape in shapes.items()}
    before = [{name: leaf(x) for name, x in states.items()} for _ in range(2)]
    # Rows end in the last piece: one in its second token, with fewer tokens than a convolution keeps.
    ends = torch.tensor([group.world * length - length + 2, group.world * length - 5], device=DEVICE)
    mask = torch.arange(group.world * length, device=DEVICE) < ends[:, None] if padded else None

    def read(x: Tensor, state: dict[str, Tensor], real: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        position = torch.zeros(rows, dtype=torch.long, device=DEVICE)
        with padding_at_the_end(real) if real is not None else contextlib.nullcontext():
            assert fused_delta.why_not(layer, x, real, x.new_zeros(rows, 1, 2)) is None
            y, after = layer(x, state, mask=real, position=position)
        return (y if real is None else y * real[..., None]), after

    own = leaf(whole.chunk(group.world, dim=1)[group.rank])
    y, after = read(own, before[0], None if mask is None else mask.chunk(group.world, dim=1)[group.rank])
    y, *last = from_last(y, *after.values())
    weights = normal(g, *whole.shape, dtype=torch.float32)
    shares = [normal(g, *x.shape, dtype=torch.float32) for x in last]
    pieces = (y * weights.chunk(group.world, dim=1)[group.rank]).sum()
    (pieces + sum((x * share).sum() for x, share in zip(last, shares, strict=True)) / group.world).backward()
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    with context_parallel(ContextGroup.alone()):
        expected, final = read(whole, before[1], mask)
        total = (expected * weights).sum()
        (total + sum((final[n] * share).sum() for n, share in zip(after, shares, strict=True))).backward()
    same(y, expected.chunk(group.world, dim=1)[group.rank], "outputs")
    for name, x in zip(after, last, strict=True):
        same(x, final[name], f"final {name}")
        theirs, mine = before[1][name].grad, before[0][name].grad
        assert theirs is not None and mine is not None
        same(mine, theirs if group.first else torch.zeros_like(theirs), f"gradient of the first {name}")
    assert own.grad is not None and whole.grad is not None
    same(own.grad, whole.grad.chunk(group.world, dim=1)[group.rank], "gradient of x")
    for name, parameter in layer.named_parameters():
        dist.all_reduce(found[name], group=group.process_group)
        assert parameter.grad is not None
        same(found[name], parameter.grad, f"gradient of {name}")


def frozen(group: ContextGroup, g: torch.Generator) -> None:
    """Where only the start needs a gradient, or only one input of the recurrence, nobody waits in vain."""
    row = OPERATIONS["gated_delta"]
    drawn = {name: x if x is None else x.double().to(DEVICE) for name, x in row.inputs(g, 1, 8).items()}
    for trained in ("initial_state", "v", "q"):
        own = {name: x if x is None or name != trained else leaf(x) for name, x in drawn.items()}
        out, _ = row.call(**own)
        out.sum().backward()
        assert own[trained].grad is not None


class Slow(torch.autograd.Function):
    """A recurrence that takes long: 10 ms forward and 10 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        return x + state, state + x

    @staticmethod
    def backward(ctx: Any, to_out: Tensor, to_final: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        return to_out + to_final, to_out + to_final


def waiting(group: ContextGroup, g: torch.Generator) -> None:
    """Ranks work on different layers: each waits for one recurrence of the rank before, not for one in each layer."""
    if group.world == 2:
        return
    layers, x = 12, leaf(normal(g, 3))
    # 12 layers and 3 ranks to wait for; layer by layer it would be 48. Other programs may take half of the time, and
    # now and then more: once in ten times they do not.
    most, taken = 2 * (layers + group.world - 1), torch.full((10,), torch.inf)
    for number in range(len(taken)):
        dist.barrier(group.process_group)
        begin, y = time.perf_counter(), x
        for _ in range(layers):
            y, _ = hand_on(*Slow.apply(y, received(torch.zeros_like(x), y)))
        y.sum().backward()
        dist.barrier(group.process_group)
        taken[number] = (time.perf_counter() - begin) / 0.02
        dist.all_reduce(taken[number], dist.ReduceOp.MAX, group.process_group)
        if taken[number] < most:
            break
    assert taken.min() < most < layers * group.world, taken


def cases() -> Iterator[tuple[str, Case]]:
    yield "previous", previous
    yield "gathered", gathered
    for reentrant in (None, False, True):
        yield f"chain, reentrant {reentrant}", partial(chain, reentrant=reentrant)
    for name, row in OPERATIONS.items():
        for backend in ("reference", "chunked", *(("triton",) if GPUS else ())):
            if backend not in OPS[row.op].backends() or backend in row.refuses:
                continue
            for rows, length in LENGTHS[backend]:
                case = partial(operation, row=row, backend=backend, rows=rows, length=length)
                yield f"{name}, {backend}, {rows} x {length}", case
        if row.packs:
            yield f"{name}, documents", partial(documents, row=row)
    yield "frozen", frozen
    if PROCESSES == 4:
        yield "waiting", waiting


def layers() -> Iterator[tuple[str, Case]]:
    """Those that run in kernels alone."""
    grafted = {"kind": "headwise", "factor": 2, "grafted": True}
    for name, expansion in (("plain", None), ("grafted", grafted)):
        for padded in (False, True):
            yield f"{name}, padded {padded}", partial(kernels_of_a_layer, expansion=expansion, padded=padded)


def run() -> None:
    rank = int(os.environ["RANK"])
    if GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPUS else "gloo", timeout=timedelta(seconds=PATIENCE))
    groups = [ContextGroup.of()]
    if PROCESSES == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups.append(ContextGroup.of(pairs[rank // 2]))
    for group in groups:
        listed = list(cases())
        if INTERPRETED:
            listed = list(layers())
        elif GPUS:
            listed += layers()
        for seed, (name, case) in enumerate(listed):
            try:
                with context_parallel(group):
                    case(group, torch.Generator().manual_seed(seed))
            except Exception as error:
                raise AssertionError(f"{name}, rank {rank} of {group.world}") from error
    assert context() is None
    dist.barrier()


def main() -> None:
    """Become the processes of the group by fork."""
    on_processes(PROCESSES, run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if INTERPRETED:
        quicken(pytest.MonkeyPatch())
    main()
