"""Fitted noise (Buitrago Ruiz and Gu 2025, intervention 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from longrecall.layers.mixers.base import LayerState
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states.base import (
    BatchRows,
    RowChoice,
    clip_heads,
    each_tensor,
    filled_state,
    is_recurrent,
    pack_layers,
    unpack_layers,
)
from longrecall.training.recipe_states import FittedNoiseRecipe


class FittedNoise:
    """Every number of the initial state is drawn from the Gaussian fitted to the final states of its layer and head.

    Mean and second moment run over the final states of the batches so far, for each head of a recurrent state and each
    channel of a convolution state; the standard deviation comes from both, so it counts how batches differ from each
    other too. Before the first final state there is nothing to fit, and the first batch starts from zero. The batch is
    that of all processes: they add up their moments, a few numbers for each head, after every batch.
    """

    by_row: ClassVar[bool] = False
    continues: ClassVar[bool] = False

    def __init__(self, recipe: FittedNoiseRecipe, model: RecurrentLM, rows: BatchRows) -> None:
        self._recipe, self._model = recipe, model
        self._rows, self._add_up = RowChoice(recipe, rows), rows.add_up
        self._seen = 0
        self._mean: tuple[LayerState, ...] | None = None
        self._second: tuple[LayerState, ...] | None = None

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return fitted noise in the chosen rows; None before the first final state and when no row is chosen."""
        chosen, mean, second = self._rows.draw(text, row), self._mean, self._second
        if mean is None or second is None:
            return None
        drawn = self._rows.noise(text, row, chosen)

        def fill(index: int, name: str, empty: Tensor) -> Tensor:
            noise = drawn.like(empty)
            center = mean[index][name]
            # Rounding can take the variance of a nearly constant head below zero.
            deviation = (second[index][name] - center.square()).clamp(min=0).sqrt()
            shape = (1, -1, *[1] * (empty.ndim - 2))
            noise = noise.mul_(deviation.to(noise.dtype).view(shape)).add_(center.to(noise.dtype).view(shape))
            return clip_heads(noise, self._recipe.clip_norm if is_recurrent(name) else None)

        return filled_state(self._model, chosen, self._recipe.convolution, fill, self._rows.shared)

    @torch.no_grad()
    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """Take the final states of a batch into the running moments."""
        self._seen += 1
        weight = self._weight()
        means: list[LayerState] = [{} for _ in final.layers]
        seconds: list[LayerState] = [{} for _ in final.layers]
        for (index, name), (mean, second) in self._moments(final).items():
            if self._mean is not None and self._second is not None:
                mean = torch.lerp(self._mean[index][name], mean, weight)
                second = torch.lerp(self._second[index][name], second, weight)
            means[index][name], seconds[index][name] = mean, second
        self._mean, self._second = tuple(means), tuple(seconds)

    def _moments(self, final: RecurrentState) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        """Return mean and second moment, float64 ``[H]``, of each tensor over the sequences of all processes."""
        found = {}
        for index, name, tensor in each_tensor(final.layers, self._recipe.convolution):
            wide = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
            others = [dim for dim in range(wide.ndim) if dim != 1]
            variance, mean = torch.var_mean(wide, dim=others, correction=0)
            found[index, name] = mean.double(), variance.double() + mean.double().square()
        if self._add_up is None or not found:
            return found
        # A process may have read more documents than another. One sum for all layers: each would take as long as all.
        count = len(final.position)
        parts = [part for both in found.values() for part in both]
        own = torch.cat([torch.cat(parts) * count, parts[0].new_tensor([count])])
        total = self._add_up(own)
        joined = iter((total[:-1] / total[-1]).split([len(part) for part in parts]))
        return {key: (next(joined), next(joined)) for key in found}

    def _weight(self) -> float:
        """Return the weight of the newest batch in the average of all `seen` ones.

        exponential: (1 - d) / (1 - d^n), so that the weights of n batches sum up to 1 from the first one on.
        """
        if self._recipe.average == "cumulative":
            return 1.0 / self._seen
        return (1.0 - self._recipe.decay) / (1.0 - float(self._recipe.decay**self._seen))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moments as ``mean.{layer}.{name}`` and ``second.{layer}.{name}`` (float64), and both counts."""
        counts = {"batches": torch.tensor(self._rows.batches), "seen": torch.tensor(self._seen)}
        return counts | pack_layers("mean", self._mean or ()) | pack_layers("second", self._second or ())

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`, on the model's device."""
        self._rows.batches, self._seen = int(tensors["batches"]), int(tensors["seen"])
        self._mean = unpack_layers("mean", tensors, self._model)
        self._second = unpack_layers("second", tensors, self._model)
