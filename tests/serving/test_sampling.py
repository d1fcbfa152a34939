"""The choice of tokens: the probabilities of transformers' processors, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as processors

from longrecall.serving.options import COLDEST, RequestOptions
from longrecall.serving.sampling import NOT_FINITE, Chooser, Sampling

ROWS, VOCABULARY = 4000, 12
CPU = torch.device("cpu")


class Given:
    """Stands for a generator: one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def expected(logits: torch.Tensor, options: RequestOptions, prompt: list[int]) -> torch.Tensor:
    """Probabilities ``[vocab]`` by transformers' own processors, in its order."""
    ids, scores = torch.tensor([prompt]), logits[None].clone()
    if options.repetition_penalty != 1:
        scores = processors.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(ids, scores)
    scores = processors.TemperatureLogitsWarper(float(options.temperature or 1))(ids, scores)
    if options.top_k:
        scores = processors.TopKLogitsWarper(options.top_k)(ids, scores)
    if options.top_p < 1:
        scores = processors.TopPLogitsWarper(options.top_p)(ids, scores)
    if options.min_p:
        scores = processors.MinPLogitsWarper(options.min_p)(ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4},
    ],
)
def test_probabilities_are_those_of_transformers(given: dict[str, Any]) -> None:
    options, prompt = RequestOptions(**given), [2, 5, 7]
    logits = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))
    rows = []
    for row in range(ROWS):
        sampling = Sampling(options, prompt, VOCABULARY, CPU)
        sampling.random = Given((row + 0.5) / ROWS)  # type: ignore[assignment]
        rows.append(sampling)
    found = Chooser(rows, CPU)(logits.expand(ROWS, -1)).tokens
    shares = torch.bincount(found, minlength=VOCABULARY) / ROWS
    # Numbers at equal distances: a share is off by one row at each of its two ends.
    torch.testing.assert_close(shares, expected(logits, options, prompt), rtol=0, atol=2 / ROWS)


def test_the_ends_of_chance() -> None:
    """Neither 0 nor almost 1 finds a token without probability."""
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 1], logits[:, 3] = 0.0, 0.5
    for given in ({}, {"top_p": 0.99}):
        rows = [Sampling(RequestOptions(temperature=1.0, **given), [0], 5, CPU) for _ in range(2)]
        rows[0].random, rows[1].random = Given(0.0), Given(1 - 2**-53)  # type: ignore[assignment]
        assert set(Chooser(rows, CPU)(logits).told.tolist()) <= {1, 3}


def test_the_coldest_temperature_and_more_tokens_than_there_are() -> None:
    logits = torch.tensor([[0.0, 1e10, -3e10]])
    for given in ({}, {"top_k": 10**400}):
        rows = [Sampling(RequestOptions(temperature=COLDEST, **given), [0], 3, CPU)]  # type: ignore[arg-type]
        assert Chooser(rows, CPU)(logits).told.tolist() == [1]


def test_rows_without_a_request_and_rows_that_are_no_numbers() -> None:
    logits = torch.tensor([[0.0, 2.0], [torch.nan, 1.0], [3.0, 1.0]])
    greedy = Sampling(RequestOptions(), [0], 2, CPU)
    assert Chooser([greedy, greedy, None], CPU)(logits).told.tolist() == [1, NOT_FINITE, 0]


def test_a_penalty_outlives_its_neighbours() -> None:
    """What was written counts in the next chooser too, whose rows are others."""
    logits = torch.tensor([[1.0, 0.9, 0.8]])
    own = Sampling(RequestOptions(repetition_penalty=2.0), [], 3, CPU)
    other = Sampling(RequestOptions(repetition_penalty=3.0), [0], 3, CPU)
    assert Chooser([own], CPU)(logits).tokens.tolist() == [0]
    assert Chooser([other, own], CPU)(logits.expand(2, -1)).tokens.tolist() == [1, 1]
    assert Chooser([own], CPU)(logits).tokens.tolist() == [2]
