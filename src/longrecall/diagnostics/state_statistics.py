"""What the recurrent state looks like: its size and how many of its directions are in use, by layer, head and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrecall.diagnostics.records import joined, to_plain
from longrecall.diagnostics.streaming import Segment, read, recurrent_tensors
from longrecall.errors import UserError
from longrecall.evaluation.statistics import bootstrap_mean_interval, bootstrap_ratio_interval
from longrecall.models.sizes import mixer_of, module_at

STATISTICS = ("mean", "std", "norm", "effective_rank", "stable_rank")


def effective_rank(state: Tensor) -> Tensor:
    """Return the effective rank of matrices ``[..., K, V]`` as float64 ``[...]``, between 1 and min(K, V).

    exp(-sum_i p_i ln p_i) with p_i = s_i / sum_j s_j over the singular values s (O. Roy and M. Vetterli 2007, "The
    effective rank: a measure of effective dimensionality", definition 1). A matrix of n equal singular values has n;
    the zero matrix has 0, a matrix that is not finite NaN. It does not depend on the scale.

    One direction much stronger than the rest hides the others: a heap of n associations whose keys share a common part
    has a low effective rank though it may hold all it can. So a value near min(K, V) says that every direction is in
    use; a low value does not prove that there is room.
    """
    return _by_singular_values(state, _entropy_rank)


def stable_rank(state: Tensor) -> Tensor:
    """Return ||S||_F^2 / ||S||_2^2 of matrices ``[..., K, V]`` as float64 ``[...]``, between 1 and min(K, V).

    M. Rudelson and R. Vershynin 2007, "Sampling from large matrices". 0 for the zero matrix, NaN for one that is not
    finite. It falls faster than `effective_rank` when one direction dominates; the two together tell such a state from
    an evenly used one.
    """
    return _by_singular_values(state, lambda values: values.square().sum(-1) / values.amax(-1).square())


def _entropy_rank(values: Tensor) -> Tensor:
    shares = values / values.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(shares).sum(-1)
    return entropy.exp()


def _by_singular_values(state: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    values = _singular_values(state)
    zero = values.amax(-1) == 0
    result = measure(torch.where(zero[..., None], 1.0, values))
    return torch.where(zero, 0.0, result)


def _singular_values(state: Tensor) -> Tensor:
    """Return singular values over the largest entry, float64 ``[..., min(K, V)]``; NaN where a matrix is not finite.

    From the eigenvalues of the smaller Gram matrix: several times faster than an SVD. Values below 1e-8 of the largest
    are lost to rounding, far too small to count in either rank.
    """
    wide = state.double()
    wide = wide if wide.shape[-1] >= wide.shape[-2] else wide.mT
    finite = torch.isfinite(wide).flatten(-2).all(-1)
    # LAPACK may fail on NaN; the scale keeps squares away from overflow.
    wide = torch.where(finite[..., None, None], wide, 0.0)
    largest = wide.abs().flatten(-2).amax(-1)
    wide = wide / torch.where(largest > 0, largest, 1.0)[..., None, None]
    values = torch.linalg.eigvalsh(wide @ wide.mT).clamp_min(0.0).sqrt()
    return torch.where(finite[..., None], values, torch.nan)


def log_positions(length: int, training_length: int, first: int = 16) -> list[int]:
    """Return positions (tokens read) at which to look at the state, one per octave, and `length` itself.

    They are the halvings of training_length down to `first`, training_length, and its doublings.
    """
    power = 0
    while training_length >> (power + 1) >= first:
        power += 1
    positions = {length}
    while (position := training_length * 2 ** max(0, -power) >> max(0, power)) <= length:
        positions.add(position)
        power -= 1
    return sorted(positions)


class StateStatistics:
    """Statistics of every head's state at chosen positions, for every sequence; no state is kept."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = sorted(set(positions))
        self._seen: dict[tuple[int, str], dict[str, dict[int, NDArray[np.float64]]]] = {}
        """(layer, path) -> statistic -> position -> float64 [sequences, heads]."""
        self._sizes: dict[tuple[int, str], tuple[int, int]] = {}

    @classmethod
    def joined(cls, positions: Sequence[int], records: Sequence[Mapping[str, Any]]) -> StateStatistics:
        """Return the statistics of the sequences of several readings, from what `record` returned of each."""
        statistics = cls(positions)
        for layers in zip(*(record["layers"] for record in records), strict=True):
            place = (int(layers[0]["layer"]), str(layers[0]["path"]))
            keys, values = layers[0]["sizes"]
            statistics._sizes[place] = (int(keys), int(values))
            statistics._seen[place] = {
                name: {
                    int(position): joined([layer["values"][name][position] for layer in layers], axis=0)
                    for position in layers[0]["values"][name]
                }
                for name in STATISTICS
            }
        return statistics

    def record(self) -> dict[str, Any]:
        """Return the statistics as plain JSON."""
        return {
            "layers": [
                {
                    "layer": layer,
                    "path": path,
                    "sizes": list(self._sizes[layer, path]),
                    "values": {
                        name: {str(position): to_plain(values) for position, values in at.items()}
                        for name, at in seen.items()
                    },
                }
                for (layer, path), seen in sorted(self._seen.items())
            ]
        }

    def stops(self) -> Sequence[int]:
        """The positions: the state there is the state at the end of a segment."""
        return self.positions

    def see(self, segment: Segment) -> None:
        """Add the state after the segment, where it ends at a position asked for."""
        if segment.end not in self.positions:
            return
        for layer, path, state in recurrent_tensors(segment.state.layers):
            self._sizes[layer, path] = (int(state.shape[-2]), int(state.shape[-1]))
            seen = self._seen.setdefault((layer, path), {name: {} for name in STATISTICS})
            for name, values in _statistics(state).items():
                seen[name][segment.end] = values

    def entries(self, described: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
        """Return what `state_statistics` returns; `described`: the description of every layer."""
        layers = []
        for (layer, path), seen in sorted(self._seen.items()):
            keys, values = self._sizes[layer, path]
            heads = next(iter(seen["norm"].values())).shape[1]
            means = {name: [at[position].mean(axis=0) for position in sorted(at)] for name, at in seen.items()}
            layers.append(
                {
                    "layer": layer,
                    "mixer": module_at(described[layer], path)["type"] + (f" ({path})" if path else ""),
                    "key_dim": keys,
                    "value_dim": values,
                    "growth": _growth(seen["norm"], seed),
                    "heads": [
                        {name: [_number(at[head]) for at in means[name]] for name in STATISTICS}
                        for head in range(heads)
                    ],
                }
            )
        fill = self._fill(sorted(self._seen), seed)
        kinds = self._kinds([(entry["layer"], entry["mixer"]) for entry in layers], described, seed)
        return {"positions": self.positions if layers else [], "fill": fill, "kinds": kinds, "layers": layers}

    def _kinds(
        self, mixers: Sequence[tuple[int, str]], described: Sequence[Mapping[str, Any]], seed: int
    ) -> list[dict[str, Any]]:
        """Return the fill of every kind of mixer by itself, and which layers have no recurrent state.

        `mixers`: layer and mixer of every entry of "layers", which are in the order of what was seen.
        """
        places: dict[str, list[tuple[int, str]]] = {}
        for place, (_, mixer) in zip(sorted(self._seen), mixers, strict=True):
            places.setdefault(mixer, []).append(place)
        found: list[dict[str, Any]] = [
            {"mixer": mixer, "layers": sorted({layer for layer, _ in own}), "fill": self._fill(own, seed)}
            for mixer, own in places.items()
        ]
        others: dict[str, list[int]] = {}
        for index in sorted(set(range(len(described))) - {layer for layer, _ in mixers}):
            others.setdefault(mixer_of(described[index])["type"], []).append(index)
        return found + [{"mixer": mixer, "layers": indices, "fill": []} for mixer, indices in others.items()]

    def _fill(self, places: Sequence[tuple[int, str]], seed: int) -> list[dict[str, Any]]:
        """Return how full the state is at every position: the median over heads of effective rank / min(K, V).

        Heads whose state has a single row or column are left out: their rank is 1 whatever they hold. Nothing where no
        head is left.
        """
        ceilings = {place: min(self._sizes[place]) for place in places if min(self._sizes[place]) > 1}
        entries: list[dict[str, Any]] = []
        for position in self.positions if ceilings else ():
            shares = np.concatenate(
                [self._seen[place]["effective_rank"][position] / ceiling for place, ceiling in ceilings.items()], axis=1
            )
            # What has diverged has no rank; the heads that have not say what there is to say.
            finite = np.isfinite(shares)
            known = shares[finite.any(axis=1)]
            entry: dict[str, Any] = {"position": position, "value": None, "low": None, "high": None}
            entry["count"] = len(known)
            if len(known):
                middle = np.nanmedian(np.where(np.isfinite(known), known, np.nan), axis=1)
                entry["value"] = float(middle.mean())
                entry["low"], entry["high"] = bootstrap_mean_interval(middle, seed=seed) or (None, None)
            entries.append(entry)
        return entries


def _growth(norms: Mapping[int, NDArray[np.float64]], seed: int) -> dict[str, list[float | None]]:
    """Return the norm of a layer's state at the end over that at each position, with its interval over sequences.

    `norms`: position -> float64 [sequences, heads]; the norm of a layer is the sum over heads. None where a number is
    not finite or the state is zero.
    """
    last = norms[max(norms)].sum(axis=1)
    growth: dict[str, list[float | None]] = {"value": [], "low": [], "high": []}
    for position in sorted(norms):
        here = norms[position].sum(axis=1)
        value, interval = None, None
        if np.isfinite(last).all() and np.isfinite(here).all() and here.all():
            value = float(last.sum() / here.sum())
            interval = bootstrap_ratio_interval(last, here, seed=seed)
        for name, number in zip(growth, (value, *(interval or (None, None))), strict=True):
            growth[name].append(number)
    return growth


def _statistics(state: Tensor) -> dict[str, NDArray[np.float64]]:
    """Return every statistic of a state ``[B, H, K, V]``: float64 ``[B, H]`` each."""
    wide = state.double()
    found = {
        "mean": wide.mean(dim=(-2, -1)),
        "std": wide.std(dim=(-2, -1), correction=0),
        "norm": torch.linalg.matrix_norm(wide),
        "effective_rank": effective_rank(wide),
        "stable_rank": stable_rank(wide),
    }
    return {name: values.cpu().numpy() for name, values in found.items()}


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def has_recurrent_state(model: Any) -> bool:
    """Whether any layer of `model` has a recurrent state; a model of attention alone has none."""
    return int(model.config.state_size()) > 0


def state_statistics(
    model: Any,
    ids: NDArray[np.int64],
    positions: Sequence[int],
    *,
    columns: int = 256,
    advance: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Any]:
    """Return statistics of the recurrent state by layer, head and position, each averaged over sequences.

    Args:
        model: a `RecurrentLM`.
        ids: int64 ``[B, T]``, read from the zero state.
        positions: numbers of tokens read, in 1..T, at which the state is looked at (`log_positions` makes a grid).
        columns: tokens of each sequence that are read at once; memory does not depend on T.
        advance: told the tokens read.

    Returns:
        ``{"positions": [...], "fill": [...], "kinds": [...], "layers": [{"layer", "mixer", "key_dim", "value_dim",
        "growth", "heads": [{...}]}]}``; a head maps "mean", "std" (over the entries of its K x V state, population),
        "norm" (Frobenius), "effective_rank" and "stable_rank" to one number per position; None where a number is not
        finite. A layer in a handover has one entry for each of its two paths, a layer of several blocks one for each
        that has a recurrence; attention layers have none. "fill" has for each position
        ``{"position", "value", "low", "high", "count"}``: the median over all heads of effective rank /
        min(K, V), and "growth" ``{"value", "low", "high"}`` for each position the layer's norm at the last position
        over the norm there; both with 95% bootstrap intervals over sequences (None with one). "kinds" has "fill" for
        each kind of mixer by itself, with its "layers", and the layers without a recurrent state.

    Raises:
        UserError: a position outside 1..T, or a model without recurrent layers.

    Source: the state statistics of "Understanding and Improving Length Generalization in Recurrent Models".
    """
    if not positions or min(positions) < 1 or max(positions) > ids.shape[1]:
        raise UserError(f"positions must lie between 1 and the {ids.shape[1]} tokens read, got {sorted(positions)}")
    if not has_recurrent_state(model):
        raise UserError("the model has no recurrent layers, so there is no state to look at; leave out the part state")
    statistics = StateStatistics(positions)
    read(model, ids[:, : max(positions)], [statistics], columns, advance, last_only=True)
    return statistics.entries(model.config.layers)
