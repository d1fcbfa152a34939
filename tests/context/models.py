"""Whole models whose sequences are cut over ranks (gloo, CPU); `main` is run in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longrecall.context import ContextGroup, context_parallel
from longrecall.errors import UserError
from longrecall.models.config import RecurrentConfig
from longrecall.models.output import RecurrentOutput
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from tests.conftest import MIXERS
from tests.hybrids import CHANNEL, HYBRIDS, LAYER_NORM, WIDTH, layer
from tests.models.test_memory_tokens import MODELS as MEMORY_MODELS
from tests.processes import PATIENCE, on_processes

PROCESSES = 4
COLUMNS = 40
VOCABULARY = 97
CLOSE = 1e-9
"""Largest error over the largest number, in float64: some layers of sums that are cut at other places."""
CLOSE_FLOAT32 = 1e-5
"""The same in float32, of one layer."""

SHARED_BLOCK = {"type": "shared_block", "mixer": MIXERS["mamba2"], "mlp_size": 12, "adapter_rank": 3} | {
    "attention": {"type": "attention", "num_heads": 2, "head_dim": 32, "input_size": 2 * WIDTH}
}
LENDER, BORROWER = (
    {"blocks": [{"name": "mixer", "module": SHARED_BLOCK | more, "norm": None}]} for more in ({}, {"weights_of": 0})
)
SHIFTED = {"input_dim": WIDTH, "inner_dim": 24}


TWINS = ("retnet_merged", "hgrn2_conv", "mamba2_groups", "kda_subheads")
"""Mixers that are two others at once, as far as pieces of a sequence go: read by `-m slow` alone."""


def alike(*starts: str) -> dict[str, Any]:
    """A model with a layer of every mixer whose name begins so, twins left out."""
    names = [name for name in MIXERS if name.startswith(starts) and (name not in TWINS or starts == TWINS)]
    return {"layers": [{"mixer": MIXERS[name], "mlp_size": 0 if index else 24} for index, name in enumerate(names)]}


MODELS: dict[str, dict[str, Any]] = {
    "twins": alike(*TWINS),
    "linear attention": alike("gla", "retnet", "hgrn2"),
    "delta rules": alike("delta", "gated_delta", "kda", "rwkv7"),
    "scans": alike("mamba", "rg_lru", "mom"),
    "convolutions": alike("base_conv", "h3", "hyena"),
    "attention": alike("attention", "mla"),
    "nested": alike("handover", "hymba", "parallel", "retrieval"),
    "rwkv": {
        "embedding_norm": LAYER_NORM,
        "layers": [
            layer(MIXERS["rwkv4"], {"type": "rwkv4_channel", **SHIFTED}, norm=LAYER_NORM),
            layer(MIXERS["rwkv5"], {"type": "rwkv6_channel", **SHIFTED}, norm=LAYER_NORM),
            layer(MIXERS["rwkv6"], CHANNEL, norm=LAYER_NORM),
            layer(MIXERS["rwkv4"], {"type": "identity"}, norm=LAYER_NORM),
        ],
    },
    "shared block": {"layers": [LENDER, {"mixer": MIXERS["gla_conv"]}, BORROWER]},
    # A mixture of experts, whose balance is that of all tokens.
    "nemotron": HYBRIDS["nemotron"],
    # Values that later layers take of the first.
    "values": HYBRIDS["rwkv"],
    **{
        f"memory tokens, {name}": {"layers": layers, "hidden_size": 20, "memory_tokens": 3}
        for name, layers in MEMORY_MODELS.items()
    },
}
IN_FLOAT32 = (
    *("gla", "delta_net", "gated_delta_net", "kda", "rwkv7", "rwkv4", "rwkv6", "mamba", "mamba2", "mom"),
    *("attention", "attention_window", "mla", "retrieval"),
)
"""Mixers, each in a model of its own."""


OVER_TWO = ("attention", "nested")
"""Models that two ranks read too."""
CACHES = (*OVER_TWO, "nemotron", *(name for name in MODELS if name.startswith("memory tokens")))
"""Models with caches, which go on after padding: a column of it in a cache holds anything."""


WHOLE = ("first", "checkpointed")
"""Batches from no state and without padding: all that their caches hold is somebody's."""


class Batch(NamedTuple):
    """Whole sequences, the state before them, and what one process finds."""

    kind: str
    ids: Tensor
    labels: Tensor
    more: dict[str, Any]
    """Further arguments of the model."""
    state: RecurrentState | None
    found: RecurrentOutput
    gradients: dict[str, Tensor]


class Case(NamedTuple):
    """A model and what it reads."""

    model: RecurrentLM
    batches: list[Batch]
    close: float


def build(changes: dict[str, Any]) -> RecurrentLM:
    torch.manual_seed(0)
    config = RecurrentConfig(**{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "initializer_range": 0.2} | changes)
    return RecurrentLM(config).train()


def arguments(g: torch.Generator) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Batches that follow each other, one with padding; packed documents and positions, from no state."""
    yield "first", 2, {}
    yield "checkpointed", 2, {}
    mask, piece = torch.rand(2, COLUMNS, generator=g) < 0.8, COLUMNS // PROCESSES
    # A row of a piece without any token, and a piece without padding.
    mask[0, piece : 2 * piece], mask[:, 2 * piece : 3 * piece] = False, True
    yield "padded", 2, {"attention_mask": mask.long()}
    yield "after", 2, {}
    ends = torch.tensor([0, 3, piece, piece + 2, 3 * piece + 1, COLUMNS - 1, COLUMNS])
    yield "packed", 1, {"cu_seqlens": ends}
    places = torch.arange(COLUMNS).repeat(2, 1)
    places[0, 7:], places[1, 2 * piece + 3 :] = torch.arange(COLUMNS - 7), torch.arange(2 * piece - 3)
    yield "positions", 2, {"position_ids": places}


def prepare(model: RecurrentLM, kinds: tuple[str, ...], close: float) -> Case:
    g = torch.Generator().manual_seed(1)
    found: list[Batch] = []
    state: RecurrentState | None = None
    for kind, rows, more in arguments(g):
        ids, labels = (torch.randint(0, VOCABULARY, (rows, COLUMNS), generator=g) for _ in range(2))
        labels[torch.rand(rows, COLUMNS, generator=g) < 0.2] = -100
        if kind not in kinds:
            continue
        before = None if kind in ("packed", "positions") else state
        out = read(model, ids % model.config.vocab_size, labels, before, more)
        gradients = differentiate(model, out, before, kind in WHOLE)
        found.append(Batch(kind, ids, labels, more, before, out, gradients))
        assert isinstance(out.past_key_values, RecurrentState)
        state = out.past_key_values.detach()
        for _, tensor in floats(state):
            tensor.requires_grad_()
    return Case(model, found, close)


def read(
    model: RecurrentLM, ids: Tensor, labels: Tensor, state: RecurrentState | None, more: dict[str, Any]
) -> RecurrentOutput:
    found = model(ids, labels=labels, past_key_values=state, **more)
    assert isinstance(found, RecurrentOutput)
    return found


def differentiate(
    model: RecurrentLM, out: RecurrentOutput, before: RecurrentState | None, whole: bool, world: int = 1
) -> dict[str, Tensor]:
    """The gradients of every parameter and of the state before, of the loss and a function of the state after.

    Each of the ranks derives its share of that function, where `world` of them compute it. `whole`: caches are in it.
    """
    assert out.loss is not None and isinstance(out.past_key_values, RecurrentState)
    total = out.loss if out.auxiliary_loss is None else out.loss + out.auxiliary_loss
    for name, tensor in named(out.past_key_values):
        # Columns of padding in a cache are nobody's.
        if name.endswith(("recurrent", "conv", "shift")) or (whole and "position" not in name):
            total = total + tensor.double().square().mean().to(total.dtype) / world
    wanted = {name: x for name, x in model.named_parameters() if x.requires_grad}
    wanted |= {} if before is None else dict(floats(before))
    for x in wanted.values():
        x.grad = None
    total.backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in wanted.items()}


def named(state: RecurrentState) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the layers."""
    for index, tensors in enumerate(state.layers):
        yield from ((f"state before {index}.{name}", tensor) for name, tensor in tensors.items())


def floats(state: RecurrentState) -> Iterator[tuple[str, Tensor]]:
    """Those that have gradients."""
    return ((name, tensor) for name, tensor in named(state) if tensor.is_floating_point())


def same(found: Tensor, expected: Tensor, what: str, close: float) -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if not found.is_floating_point():
        assert torch.equal(found, expected), (what, found, expected)
    elif found.numel():
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert error < close, (what, error.item())


def compare(case: Case, group: ContextGroup) -> None:
    for batch in case.batches:
        try:
            compare_batch(case, batch, group)
        except Exception as error:
            raise AssertionError(batch.kind) from error


def compare_batch(case: Case, batch: Batch, group: ContextGroup) -> None:
    model, close, expected = case.model, case.close, batch.found

    def cut(x: Tensor) -> Tensor:
        return x.chunk(group.world, dim=1)[group.rank]

    more = {name: x if name == "cu_seqlens" else cut(x) for name, x in batch.more.items()}
    more["loss_only"] = batch.kind != "packed"
    if batch.kind == "checkpointed":
        model.activation_checkpointing_enable()
    with context_parallel(group):
        out = read(model, cut(batch.ids) % model.config.vocab_size, cut(batch.labels), batch.state, more)
        gradients = differentiate(model, out, batch.state, batch.kind in WHOLE, group.world)
        with torch.no_grad():
            padded = batch.kind == "padded"
            own = {"loss_only": False}
            logits = (
                read(model, cut(batch.ids) % model.config.vocab_size, cut(batch.labels), batch.state, more | own).logits
                if padded
                else out.logits
            )
    model.activation_checkpointing_disable()
    assert out.loss is not None and expected.loss is not None and expected.logits is not None
    same(out.loss, expected.loss, "loss", close)
    if expected.auxiliary_loss is not None:
        assert out.auxiliary_loss is not None
        same(out.auxiliary_loss, expected.auxiliary_loss, "auxiliary loss", close)
    if logits is not None:
        real = more.get("attention_mask", torch.ones_like(cut(batch.ids))).bool()
        same(logits[real], cut(expected.logits)[real], "logits", close)
    compare_states(out, expected, close)
    # In one message: there are hundreds of parameters.
    total = torch.cat([gradients[name].flatten() for name in batch.gradients])
    dist.all_reduce(total, group=group.process_group)
    parts = total.split([gradient.numel() for gradient in batch.gradients.values()])
    for (name, wanted), part in zip(batch.gradients.items(), parts, strict=True):
        same(part.view_as(wanted), wanted, f"gradient of {name}", close)


def compare_states(out: RecurrentOutput, expected: RecurrentOutput, close: float) -> None:
    after, last = out.past_key_values, expected.past_key_values
    assert isinstance(after, RecurrentState) and isinstance(last, RecurrentState)
    same(after.position, last.position, "positions", close)
    assert after.length == last.length
    if last.context is not None:
        assert after.context is not None
        same(after.context, last.context, "token ids", close)
    for index, (ours, theirs) in enumerate(zip(after.layers, last.layers, strict=True)):
        assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
        for name in theirs:
            place = f"{name.removesuffix(name.rpartition('.')[2])}position"
            cache = place in theirs and "memory" not in name
            # A column of padding holds anything, and stands anywhere.
            own, wanted = (x[name][x[place] >= 0] if cache else x[name] for x in (ours, theirs))
            if name.endswith("value") and not cache:
                # Before the first token of a row stand zeros, as many as there is padding in all pieces.
                own = own[:, own.shape[1] - wanted.shape[1] :]
            same(own, wanted, f"state {index}.{name}", close)


def refusals(group: ContextGroup) -> None:
    """Every rank says so where ranks read unequal pieces: none waits for the others in vain."""
    model, ids = build({"layers": [{"mixer": MIXERS["attention"]}]}), torch.zeros(1, 8, dtype=torch.long)
    columns = ", ".join(str(8 - rank) for rank in range(group.world))
    given = ", ".join(["given", *["missing"] * (group.world - 1)])
    unequal: list[tuple[str, dict[str, Any]]] = [
        (f"columns {columns} on", {"input_ids": ids[:, group.rank :]}),
        (f"labels {given} on", {"input_ids": ids, "labels": None if group.rank else ids}),
    ]
    for line, more in unequal:
        with context_parallel(group), pytest.raises(UserError, match=line):
            model(**more)


def prepare_all(names: list[str]) -> dict[str, Case]:
    every = ("checkpointed", "padded", "packed")
    cases = {}
    for name, changes in MODELS.items():
        more = ("positions",) * (name == "nemotron") + ("after",) * (name in CACHES)
        if name in (names or MODELS.keys() - {"twins"}):
            cases[name] = prepare(build(changes).double(), every + more, CLOSE)
    for name in IN_FLOAT32:
        if not names or name in names:
            model = build({"layers": [{"mixer": MIXERS[name], "mlp_size": 24}]})
            cases[f"{name} in float32"] = prepare(model, ("first",), CLOSE_FLOAT32)
    return cases


def run(cases: dict[str, Case]) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (ContextGroup.of(), ContextGroup.of(pairs[rank // 2])):
        for name, case in cases.items():
            if group.world == 2 and name not in OVER_TWO:
                continue
            try:
                compare(case, group)
            except Exception as error:
                raise AssertionError(f"{name}, rank {rank} of {group.world}") from error
        refusals(group)
    dist.barrier()


def main(*names: str) -> None:
    """Read all sequences whole, then in pieces on four ranks, which are forks that have what was found."""
    on_processes(PROCESSES, partial(run, prepare_all(list(names))))
