"""Short prompts side by side: what one forward pass for each computes, in the segments that take the least time."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.inference import prompt_batches
from longrecall.inference.prompt_batches import LENGTHS, ROWS, SEGMENT_COST, PromptBatches
from longrecall.ops.execution import fixed_shapes
from tests.conftest import MIXERS
from tests.inference.test_decoding import model_of
from tests.inference.test_reader import TOLERANCE


@pytest.mark.parametrize("name", ["gla_conv", "gated_delta_net", "mamba2", "rwkv7", "rg_lru"])
@torch.no_grad()
def test_prompts_side_by_side_equal_single_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start and from other states; what an earlier, longer group has left in the rows is gone."""
    monkeypatch.setattr(prompt_batches, "ROWS", (1, 4))
    monkeypatch.setattr(prompt_batches, "LENGTHS", (8, 16))
    model, chance = model_of(MIXERS[name]), random.Random(0)
    batches = PromptBatches(model)
    for lengths in ([16, 3, 9, 1], [8, 2, 5], [1], [13]):
        pieces = [[chance.randrange(40) for _ in range(length)] for length in lengths]
        for begun in (0, 5):
            before = model(torch.randint(0, 40, (len(pieces), begun))).past_key_values if begun else None
            with fixed_shapes():  # as while a graph is recorded
                logits, after = batches.read(pieces, before)
            for row, piece in enumerate(pieces):
                start = None if before is None else before.select_rows(torch.tensor([row]))
                alone = model(torch.tensor([piece]), past_key_values=start)
                torch.testing.assert_close(logits[row], alone.logits[0, -1], **TOLERANCE)
                assert after.position[row] == alone.past_key_values.position[0] == begun + len(piece)
                for found, layer in zip(after.layers, alone.past_key_values.layers, strict=True):
                    for key, tensor in layer.items():
                        torch.testing.assert_close(found[key][row], tensor[0], **TOLERANCE, check_dtype=False)


def seconds(lengths: list[int], cuts: list[list[int]]) -> int:
    """The time of these segments, in tokens."""
    total = 0
    for cut in cuts:
        rows = next(rows for rows in ROWS if rows >= len(cut))
        longest = max(lengths[number] for number in cut)
        total += SEGMENT_COST + rows * next(length for length in LENGTHS if length >= longest)
    return total


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, LENGTHS[-1]), min_size=1, max_size=7), st.sampled_from([512, 2048, 8192]))
def test_the_segments_that_take_the_least_time(lengths: list[int], most: int) -> None:
    """Against all ways to cut the prompts in the order of their lengths."""
    batches = PromptBatches.__new__(PromptBatches)
    batches.rows = ROWS
    cuts = batches.passes(lengths, most)
    assert sorted(itertools.chain(*cuts)) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    ways = []
    for marks in itertools.product((False, True), repeat=len(lengths) - 1):
        edges = [0, *(i + 1 for i, mark in enumerate(marks) if mark), len(lengths)]
        way = [order[i:j] for i, j in itertools.pairwise(edges)]
        if all(len(cut) == 1 or seconds(lengths, [cut]) - SEGMENT_COST <= most for cut in way):
            ways.append(seconds(lengths, way))
    assert seconds(lengths, cuts) == min(ways)


def test_few_slots_get_few_rows() -> None:
    """Rows of segments have states of their own."""
    model = model_of(MIXERS["gla"])
    assert [PromptBatches(model, most).rows for most in (0, 1, 5, 64)] == [(1,), (1,), (1, 4), ROWS]
