"""Slots of a decoding step: sequences join, move and leave, against the model's own forward pass."""

from __future__ import annotations

import random

import pytest
import torch

from longrecall.inference.slots import (
    MOST_RECORDED,
    RecordedSlots,
    Slots,
    SlotStep,
    make_slots,
    slot_room,
    why_no_slots,
)
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS
from tests.inference.test_decoding import model_of as fixed_of
from tests.inference.test_decoding_attention import model_of as cached_of

FIXED = ("gated_delta_net", "mamba2", "handover")
CACHED = ("window", "latent", "hymba")


def another(model: RecurrentLM, step: Slots) -> Slots:
    """Slots of the same kind, with more room."""
    if isinstance(step, SlotStep):
        return SlotStep(model, len(step.ids), room=2 * step.room, fused=step.fused)
    return RecordedSlots(model, len(step.ids))


def as_it_comes(model: RecurrentLM, step: Slots, seed: int, turns: int = 24, most: int = 32) -> None:
    """Sequences come and go at random; every token's logits are those of one forward pass."""
    chance, slots = random.Random(seed), len(step.ids)
    live: dict[int, list[int]] = {}
    for turn in range(turns):
        free = [row for row in range(slots) if row not in live]
        if free and chance.random() < 0.6:
            rows = chance.sample(free, min(len(free), chance.randint(1, 2)))
            length = chance.randint(1, min(10, most - 1))
            ids = torch.tensor([[chance.randrange(40) for _ in range(length)] for _ in rows])
            step.join(rows, model(ids).past_key_values)
            live |= dict(zip(rows, ids.tolist(), strict=True))
        free = [row for row in range(slots) if row not in live]
        if live and free and chance.random() < 0.3:
            row, to = chance.choice(list(live)), chance.choice(free)
            step.move([row], [to])
            live[to] = live.pop(row)
        if turn == turns // 2:
            larger = another(model, step)
            larger.join(list(live), step.take(list(live)))
            step = larger
        for row, ids in live.items():
            ids.append(chance.randrange(40))
            step.ids[row] = ids[-1]
        logits = step.decode(max(live, default=0) + 1)
        for row, ids in list(live.items()):
            # float32 sums in another order.
            torch.testing.assert_close(logits[row], model(torch.tensor([ids])).logits[0, -1], rtol=1e-4, atol=2e-5)
            if len(ids) == most or chance.random() < 0.1:
                del live[row]


@pytest.mark.parametrize("name", FIXED)
@torch.no_grad()
def test_sequences_come_and_go(name: str) -> None:
    model = fixed_of(MIXERS[name])
    as_it_comes(model, SlotStep(model, 5), seed=3)


@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_sequences_with_caches_come_and_go(name: str) -> None:
    """Far enough for the columns of a cache to be used round and round."""
    model = cached_of(name)
    as_it_comes(model, SlotStep(model, 5, room=16), seed=4, turns=48, most=16)


@pytest.mark.parametrize("name", ["full", "meta"])
@torch.no_grad()
def test_slots_in_kernels(name: str) -> None:
    """In Triton's interpreter: the kernel of attention reads all columns once they are used round and round."""
    pytest.importorskip("triton")
    model = cached_of(name)
    as_it_comes(model, SlotStep(model, 5, room=8, fused=True), seed=6, turns=12, most=8)


@pytest.mark.parametrize("name", ["gla_conv", "rwkv7"])
@torch.no_grad()
def test_recorded_slots(name: str) -> None:
    model = fixed_of(MIXERS[name])
    step = make_slots(model, 5)
    assert isinstance(step, RecordedSlots)
    as_it_comes(model, step, seed=5)


def test_who_is_recorded() -> None:
    model = fixed_of(MIXERS["gla"])
    assert isinstance(make_slots(model, MOST_RECORDED + 1), SlotStep)
    assert isinstance(make_slots(cached_of("full"), 2, room=16), SlotStep)
    model.decoding.graphs = False
    assert isinstance(make_slots(model, 2), SlotStep)


@torch.no_grad()
def test_what_others_left_in_a_slot_is_gone() -> None:
    """NaN times zero is NaN: what a mask hides must be a number."""
    model = cached_of("full")
    step = SlotStep(model, 2, room=16)
    for buffers in step.buffers:
        for tensor in buffers.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    ids = torch.tensor([[3, 4, 5]])
    step.join([1], model(ids).past_key_values)
    step.ids[1] = 6
    expected = model(torch.tensor([[3, 4, 5, 6]])).logits[0, -1]
    torch.testing.assert_close(step.decode(2)[1], expected, rtol=1e-4, atol=2e-5)


def test_models_that_have_no_slots_say_why() -> None:
    assert "layer 0 (hyena)" in str(why_no_slots(fixed_of(MIXERS["hyena"])))
    assert "retrieval" in str(why_no_slots(fixed_of(MIXERS["retrieval"])))
    assert "training" in str(why_no_slots(fixed_of(MIXERS["gla"]).train()))
    assert why_no_slots(fixed_of(MIXERS["gla"])) is None


def test_few_counts_of_rows_and_few_rooms() -> None:
    step = SlotStep(fixed_of(MIXERS["gla"]), 70)
    assert step.counts == [1, 2, 4, 8, 16, 32, 48, 64, 70]
    assert [step.count_for(rows) for rows in (1, 3, 33, 65, 70)] == [1, 4, 48, 70, 70]
    assert [slot_room(tokens) for tokens in (1, 256, 257)] == [256, 256, 512]
