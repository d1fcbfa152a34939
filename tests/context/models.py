"""Whole models whose sequences are cut over ranks: ``python -m tests.context.models PORT [NAME ...]`` (gloo, CPU).

A process takes seconds to import everything, so one imports and becomes four by fork. Each rank reads the whole
sequence by itself too, outside of the group, and compares.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longrecall.context import ContextGroup, context_parallel
from longrecall.models.config import RecurrentConfig
from longrecall.models.output import RecurrentOutput
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from tests.conftest import MIXERS
from tests.hybrids import HYBRIDS

PROCESSES = 4
CLOSE = 1e-9
"""Largest error over the largest number, in float64: a few layers of sums that were cut at other places."""
CLOSE_FLOAT32 = 1e-5
WIDTH, VOCABULARY = 32, 97

TOGETHER: dict[str, list[str]] = {
    "linear": [name for name in MIXERS if name.startswith(("gla", "retnet", "hgrn2"))],
    "delta": [name for name in MIXERS if name.startswith(("delta", "gated_delta", "kda", "rwkv7"))],
    "ssm": ["mamba", "mamba2", "mamba2_groups", "rg_lru", "rwkv4", "rwkv5", "rwkv6", "mom", "mom_linear"],
    "convolutions": ["base_conv", "base_conv_wide", "base_conv_implicit", "h3", "hyena"],
    "attention": ["attention", "attention_meta", "attention_window", "attention_options", "mla"],
    "nested": ["handover", "hymba", "parallel", "retrieval"],
}


class Batch(NamedTuple):
    """What the whole sequence is."""

    ids: Tensor
    labels: Tensor
    more: dict[str, Any]
    """Further arguments of the whole."""


def build(name: str) -> RecurrentLM:
    torch.manual_seed(0)
    names = TOGETHER.get(name, [name])
    if name in HYBRIDS:
        changes = dict(HYBRIDS[name])
    else:
        changes = {"layers": [{"mixer": MIXERS[n], "mlp_size": 24 if i == 0 else 0} for i, n in enumerate(names)]}
    config = RecurrentConfig(**{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "initializer_range": 0.2} | changes)
    return RecurrentLM(config).double().train()


def draw(g: torch.Generator, rows: int, length: int, **more: Any) -> Batch:
    ids, labels = (torch.randint(0, VOCABULARY, (rows, length), generator=g) for _ in range(2))
    labels[torch.rand(rows, length, generator=g) < 0.2] = -100
    return Batch(ids, labels, more)


def batches(g: torch.Generator, total: int) -> Iterator[tuple[str, Batch]]:
    """Three that follow each other, the last of which has padding; and one of packed documents, from no state."""
    yield "first", draw(g, 2, total)
    mask = torch.rand(2, total, generator=g) < 0.8
    # A piece without any token, and one without padding.
    piece = total // PROCESSES
    mask[0, piece : 2 * piece], mask[:, 2 * piece : 3 * piece] = False, True
    yield "padded", draw(g, 2, total, attention_mask=mask.long())
    yield "third", draw(g, 2, total)
    ends = [0, 3, piece, piece + 2, 3 * piece + 1, total - 1, total]
    yield "packed", draw(g, 1, total, cu_seqlens=torch.tensor(ends))


def piece_of(batch: Batch, group: ContextGroup) -> Batch:
    def cut(x: Tensor) -> Tensor:
        return x.chunk(group.world, dim=1)[group.rank]

    more = {name: x if name == "cu_seqlens" else cut(x) for name, x in batch.more.items()}
    return Batch(cut(batch.ids), cut(batch.labels), more)


def read(model: RecurrentLM, batch: Batch, state: RecurrentState | None, loss_only: bool) -> RecurrentOutput:
    found = model(batch.ids, labels=batch.labels, past_key_values=state, loss_only=loss_only, **batch.more)
    assert isinstance(found, RecurrentOutput)
    return found


def gradients(model: RecurrentLM, out: RecurrentOutput) -> dict[str, Tensor]:
    assert out.loss is not None
    total = out.loss if out.auxiliary_loss is None else out.loss + out.auxiliary_loss
    model.zero_grad()
    total.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def same(found: Tensor, expected: Tensor, what: str, close: float) -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if not found.is_floating_point():
        assert torch.equal(found, expected), (what, found, expected)
    elif found.numel():
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert error < close, (what, error.item())


def compare(model: RecurrentLM, group: ContextGroup, total: int, close: float = CLOSE) -> None:
    g = torch.Generator().manual_seed(total)
    state: RecurrentState | None = None
    for kind, batch in batches(g, total):
        before = None if kind == "packed" else state
        expected = read(model, batch, before, False)
        wanted = gradients(model, expected)
        own = piece_of(batch, group)
        with context_parallel(group):
            out = read(model, own, before, True)
            found = gradients(model, out)
            with torch.no_grad():
                logits = read(model, own, before, False).logits
        assert out.loss is not None and expected.loss is not None and logits is not None
        same(out.loss, expected.loss, f"{kind}: loss", close)
        if expected.auxiliary_loss is not None:
            same(out.auxiliary_loss, expected.auxiliary_loss, f"{kind}: auxiliary loss", close)
        mine = expected.logits.chunk(group.world, dim=1)[group.rank]
        real = own.more.get("attention_mask", torch.ones_like(own.ids)).bool()
        same(logits[real], mine[real], f"{kind}: logits", close)
        after, last = out.past_key_values, expected.past_key_values
        assert isinstance(after, RecurrentState) and isinstance(last, RecurrentState)
        same(after.position, last.position, f"{kind}: positions", close)
        assert after.length == last.length
        if last.context is not None:
            same(after.context, last.context, f"{kind}: token ids", close)
        for index, (ours, theirs) in enumerate(zip(after.layers, last.layers, strict=True)):
            assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
            for name in theirs:
                place = f"{name.removesuffix(name.rpartition('.')[2])}position"
                cache = place in theirs and "memory" not in name
                # A column of padding holds anything, and stands anywhere.
                pair = (x[name][x[place] >= 0] if cache else x[name] for x in (ours, theirs))
                kept, theirs_kept = pair
                if not cache and name.endswith("value"):
                    # Before the first token of a row stand zeros, as many as there is padding in all pieces.
                    kept = kept[:, kept.shape[1] - theirs_kept.shape[1] :]
                same(kept, theirs_kept, f"{kind}: state {index}.{name}", close)
        for name, expected_gradient in wanted.items():
            gradient = found[name].contiguous()
            dist.all_reduce(gradient, group=group.process_group)
            same(gradient, expected_gradient, f"{kind}: gradient of {name}", close)
        if kind != "packed":
            state = last.detach()


def run(rank: int, port: str, names: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    failed = []
    for name in names or [*TOGETHER, *HYBRIDS]:
        model = build(name)
        for group, total in ((ContextGroup.of(), 40), (ContextGroup.of(pairs[rank // 2]), 24)):
            try:
                compare(model, group, total)
            except Exception as error:
                raise AssertionError(f"{name}, rank {rank} of {group.world}") from error
    dist.barrier()
    dist.destroy_process_group()
    assert not failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    others = []
    rank = 0
    for other in range(1, PROCESSES):
        child = os.fork()
        if not child:
            rank, others = other, []
            break
        others.append(child)
    failed = False
    try:
        run(rank, sys.argv[1], sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        failed = True
    sys.stderr.flush()
    if rank:
        os._exit(int(failed))
    if failed:
        os._exit(1)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in others))
