"""Teacher-forced scoring equals greedy generation, and reading in segments equals reading at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from longrecall import RecurrentLM
from longrecall.evaluation.reading import pad_right, read_predictions
from longrecall.evaluation.scoring import score_answers
from longrecall.tasks import IGNORE


def prompts_and_answers(model: RecurrentLM, count: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random prompts; the answers are greedy text of the model, spoilt at a random place in half of the cases."""
    rng = np.random.default_rng(0)
    cases = []
    for case in range(count):
        prompt = rng.integers(0, 258, size=int(rng.integers(3, 40)))
        answer = greedy(model, prompt, size)
        if case % 2:
            place = int(rng.integers(size))
            answer[place] = (answer[place] + 1 + rng.integers(257)) % 258
        cases.append((prompt, answer))
    return cases


def greedy(model: RecurrentLM, prompt: np.ndarray, size: int) -> np.ndarray:
    out = model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=size, do_sample=False, eos_token_id=None, pad_token_id=257
    )
    return out[0, len(prompt) :].numpy().copy()


def test_teacher_forcing_equals_exact_match_of_generate(model: RecurrentLM) -> None:
    cases = prompts_and_answers(model, 24, 4)
    ids = [np.concatenate(case) for case in cases]
    labels = [np.concatenate([np.full(len(prompt), IGNORE), answer]) for prompt, answer in cases]
    read = read_predictions(model, pad_right(ids, 0), pad_right(labels, IGNORE), segment_tokens=1000)
    right, asked, diverged = score_answers(labels, read)
    generated = [bool((greedy(model, prompt, 4) == answer).all()) for prompt, answer in cases]
    assert right.astype(bool).tolist() == generated
    # Neither always right nor always wrong, or the equality would say little.
    assert sum(generated) == 12
    assert len({tuple(answer) for _, answer in cases}) > 12
    assert (asked == 1).all() and not diverged.any()


@pytest.mark.parametrize("segment", [1, 3, 7, 29, 30, 64])
def test_segments_equal_one_pass(model: RecurrentLM, segment: int) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 258, size=(3, 30))
    labels = np.where(rng.random((3, 30)) < 0.3, ids, IGNORE)
    labels[1, :20] = IGNORE
    labels[0, 0] = ids[0, 0]  # nothing predicts the first token: it must not be scored
    whole = read_predictions(model, ids, labels, 1000)
    parts = read_predictions(model, ids, labels, segment)
    np.testing.assert_array_equal(parts.row, whole.row)
    np.testing.assert_array_equal(parts.column, whole.column)
    # float32 sums in another order; losses are of size 10.
    np.testing.assert_allclose(parts.loss, whole.loss, atol=1e-3)
    assert len(whole.loss) == int((labels[:, 1:] != IGNORE).sum())


def test_losses_equal_the_models_own(model: RecurrentLM) -> None:
    ids = np.random.default_rng(2).integers(0, 258, size=(2, 20))
    tensor = torch.from_numpy(ids)
    with torch.no_grad():
        expected = float(model(tensor, labels=tensor).loss)
    # The same float32 losses averaged in float64 instead of float32.
    assert read_predictions(model, ids, ids, 100).loss.mean() == pytest.approx(expected, rel=1e-5)


def test_a_model_without_logits_to_keep(model: RecurrentLM) -> None:
    class Plain:
        device = model.device

        def forward(self, ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
            return model(ids, past_key_values=past_key_values, use_cache=use_cache)

        __call__ = forward

    ids = np.random.default_rng(3).integers(0, 258, size=(2, 25))
    labels = np.full_like(ids, IGNORE)
    labels[:, [5, 17]] = ids[:, [5, 17]]
    # The head's matrix product over fewer rows may round differently.
    np.testing.assert_allclose(
        read_predictions(Plain(), ids, labels, 10).loss, read_predictions(model, ids, labels, 10).loss, atol=1e-4
    )


def test_no_labels_at_all(model: RecurrentLM) -> None:
    ids = np.zeros((2, 5), dtype=np.int64)
    read = read_predictions(model, ids, np.full_like(ids, IGNORE), 3)
    assert len(read.loss) == 0


def test_only_a_whole_answer_counts() -> None:
    from longrecall.evaluation.reading import Predictions

    labels = [np.array([IGNORE, 1, 2, IGNORE, 3]), np.array([IGNORE, 4, IGNORE])]
    read = Predictions(
        row=np.array([0, 0, 0, 1]),
        column=np.array([1, 2, 4, 1]),
        right=np.array([True, False, True, False]),
        loss=np.zeros(4),
        finite=np.array([True, True, True, False]),
    )
    right, asked, diverged = score_answers(labels, read)
    assert (right.tolist(), asked.tolist(), diverged.tolist()) == ([1, 0], [2, 1], [False, True])
