"""Noise and fitted noise: the distributions they draw from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states import FittedNoise, Noise
from longrecall.training.initial_states.base import BatchRows
from longrecall.training.recipe_states import FittedNoiseRecipe, NoiseRecipe
from tests.conftest import MIXERS

ModelMaker = Callable[..., RecurrentLM]
MANY = torch.ones(500, dtype=torch.bool)


def finals(model: RecurrentLM, batches: int, rows: int = 4) -> list[RecurrentState]:
    """Final states of batches whose texts grow longer, so that they differ in their mean and spread."""
    found = []
    for number in range(batches):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 256, (rows, 3 + 8 * number), generator=generator)
        found.append(model(tokens).past_key_values.detach())
    return found


def heads(tensor: Tensor) -> Tensor:
    """``[B, H, ...]`` -> float64 ``[H, numbers]``."""
    return tensor.double().transpose(0, 1).flatten(1)


def assert_gaussian(drawn: Tensor, mean: Tensor, std: Tensor) -> None:
    """`drawn` ``[H, n]`` has mean and std ``[H]`` within six standard errors: one false alarm in 10^8 heads."""
    count = drawn.shape[1]
    assert bool(((drawn.mean(1) - mean).abs() <= 6 * std / count**0.5).all())
    assert bool(((drawn.std(1) - std).abs() <= 6 * std / (2 * count) ** 0.5).all())
    # A Gaussian has kurtosis 3, a uniform distribution 1.8; the standard error is sqrt(24 / n).
    kurtosis = ((drawn - drawn.mean(1, keepdim=True)) ** 4).mean(1) / drawn.var(1) ** 2
    assert bool(((kurtosis - 3).abs() < 6 * (24 / count) ** 0.5).all())


@pytest.mark.parametrize("std", [0.01, 3.0])
def test_noise_has_one_deviation_for_every_layer_and_head(make_model: ModelMaker, std: float) -> None:
    model = make_model(MIXERS["gla_conv"], MIXERS["attention"], MIXERS["mamba2"])
    state = Noise(NoiseRecipe(std=std, convolution=True), model, BatchRows(0)).before_batch(MANY)
    assert state is not None and state.position.eq(0).all() and state.length == 0
    assert state.layers[1]["key"].numel() == 0
    for layer in (0, 2):
        for tensor in state.layers[layer].values():
            assert_gaussian(heads(tensor), torch.tensor(0.0), torch.tensor(std))


def test_noise_is_new_in_every_batch_and_row_and_the_same_for_a_seed(make_model: ModelMaker) -> None:
    model = make_model()

    def draw(seed: int = 0, first: int = 0, batches: int = 1) -> Tensor:
        initial = Noise(NoiseRecipe(std=1.0), model, BatchRows(seed, first))
        for _ in range(batches):
            state = initial.before_batch(MANY[:2])
        assert state is not None
        return state.layers[0]["recurrent"]

    assert torch.equal(draw(), draw())
    others = [draw(), draw(seed=1), draw(first=2), draw(batches=2)]
    for number, one in enumerate(others):
        for other in others[:number]:
            # 256 numbers a row: independent ones correlate by 1/sqrt(512) = 0.04; the bound is five times that.
            assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs() < 0.22


def expected_moments(recipe: FittedNoiseRecipe, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation over the final states ``[B, H, ...]`` of all batches, each batch with its weight."""
    count = len(batches)
    weights = torch.ones(count, dtype=torch.float64)
    if recipe.average == "exponential":
        weights = recipe.decay ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
    weights = weights / weights.sum()
    mean = sum(w * heads(t).mean(1) for w, t in zip(weights, batches, strict=True))
    spread = sum(
        w * (heads(t) - torch.as_tensor(mean)[:, None]).square().mean(1) for w, t in zip(weights, batches, strict=True)
    )
    return torch.as_tensor(mean), torch.as_tensor(spread).sqrt()


@pytest.mark.parametrize("mixer", ["gla_merged", "delta_net", "gated_delta_net", "mamba2_groups", "retnet", "handover"])
@pytest.mark.parametrize("options", [{"average": "cumulative"}, {"average": "exponential", "decay": 0.5}])
def test_fitted_noise_has_the_moments_of_the_final_states(
    make_model: ModelMaker, mixer: str, options: dict[str, object]
) -> None:
    """Per head of the recurrent state and per channel of a convolution state, against the states put together."""
    model, recipe = make_model(MIXERS[mixer]), FittedNoiseRecipe(**options)
    initial = FittedNoise(recipe, model, BatchRows(0))
    assert initial.before_batch(MANY) is None
    seen = finals(model, 3)
    for final in seen:
        initial.after_batch(final)
    state = initial.before_batch(MANY)
    assert state is not None
    stored = initial.state_dict()
    for name, tensor in state.layers[0].items():
        mean, std = expected_moments(recipe, [final.layers[0][name] for final in seen])
        found = (stored[f"second.0.{name}"] - stored[f"mean.0.{name}"].square()).sqrt()
        # The batch moments are taken in float32 (1e-7 relative to the numbers), then averaged in float64.
        torch.testing.assert_close(stored[f"mean.0.{name}"], mean, rtol=1e-5, atol=1e-10)
        torch.testing.assert_close(found, std, rtol=1e-4, atol=1e-10)
        assert tensor.shape[0] == 500
        assert_gaussian(heads(tensor), mean, std)


def test_a_head_that_never_changes_gives_its_value_back(make_model: ModelMaker) -> None:
    """The variance of equal numbers is 0, whatever rounding says."""
    model = make_model(MIXERS["gla"])
    final = finals(model, 1)[0].map(lambda tensor: torch.full_like(tensor, 0.1))
    initial = FittedNoise(FittedNoiseRecipe(), model, BatchRows(0))
    for _ in range(5):
        initial.after_batch(final)
    state = initial.before_batch(MANY[:2])
    assert state is not None
    # 0.1 squared and back in float64: an error of 1e-17 in the variance is 1e-8 in the deviation.
    torch.testing.assert_close(state.layers[0]["recurrent"], final.layers[0]["recurrent"][:2], rtol=0, atol=1e-7)


def test_clip_norm_limits_what_is_drawn(make_model: ModelMaker) -> None:
    model = make_model(MIXERS["mamba2"])
    final = finals(model, 3)[2]

    def drawn_norms(limit: float | None) -> Tensor:
        initial = FittedNoise(FittedNoiseRecipe(clip_norm=limit), model, BatchRows(0))
        initial.after_batch(final)
        state = initial.before_batch(MANY)
        assert state is not None
        return torch.linalg.vector_norm(state.layers[0]["recurrent"], dim=(-2, -1))

    free = drawn_norms(None)
    limit = float(free.median())
    # One float32 multiplication and the norm of 64 numbers.
    torch.testing.assert_close(drawn_norms(limit), free.clamp(max=limit), rtol=1e-5, atol=0.0)
