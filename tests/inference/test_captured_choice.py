"""Which choices of the next token are captured; on a GPU what they choose is compared in test_gpu_decoding.py."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as processors

from longrecall.inference.captured_choice import SERVED, choice_key


def test_choices_that_look_at_scores_alone_are_served() -> None:
    one = [processors.TemperatureLogitsWarper(0.5), processors.TopKLogitsWarper(7)]
    other = [processors.TemperatureLogitsWarper(0.5), processors.TopKLogitsWarper(8)]
    key = choice_key(one, True, (3, 5), 0)
    assert key is not None and key == choice_key([*one], True, (3, 5), 0) and hash(key)
    assert (
        len({key, *(choice_key(one, *rest) for rest in ((False, (3, 5), 0), (True, (3,), 0), (True, (3, 5), 1)))}) == 4
    )
    assert choice_key(other, True, (3, 5), 0) != key and choice_key(one[::-1], True, (3, 5), 0) != key
    assert choice_key([], False, (), 0) is not None


def test_choices_that_look_at_ids_are_not_served() -> None:
    class Mine(processors.TopKLogitsWarper):
        """A processor of one's own may do anything."""

    for one in (processors.RepetitionPenaltyLogitsProcessor(1.2), processors.NoRepeatNGramLogitsProcessor(2), Mine(3)):
        assert choice_key([one], True, (), 0) is None
    odd = processors.TopKLogitsWarper(3)
    odd.top_k = torch.tensor(3)
    assert choice_key([odd], True, (), 0) is None


@pytest.mark.parametrize("kind", SERVED)
def test_served_processors_need_no_ids(kind: type) -> None:
    """And give the same scores from no ids, so that they can be captured."""
    value = {processors.TemperatureLogitsWarper: 0.7, processors.TopKLogitsWarper: 3}.get(kind, 0.2)
    scores = torch.randn(2, 11, generator=torch.Generator().manual_seed(0))
    process = kind(value)
    assert choice_key([process], True, (), 0) is not None
    expected = process(torch.zeros(2, 4, dtype=torch.long), scores.clone())
    assert torch.equal(process(None, scores.clone()), expected)
