"""Which parameters are trained, at which peak learning rates: what surgery touched, what patterns name, the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from longrecall.errors import UserError, did_you_mean
from longrecall.training.recipe import OptimizerRecipe

NO_DECAY = (
    *("norm.weight", "bias", "A_log", ".D", "mixing", "subhead_scale", "conv.weight", "embeddings.weight"),
    *("A_imag", "log_step", ".C", ".skip", ".frequency", "meta_key", "meta_value", "temperature"),
    "memory_tokens",
    *(".mix", ".mix_x", ".mix_k", ".mix_v", ".mix_r", ".mix_up", ".value_share", ".bounds"),
    *("mix_down.weight", ".decay", "decay_down.weight", "decay_up.weight", ".bonus"),
    *(
        ".rate",
        "removal_scale",
        "rate_scale",
        "rate_down.weight",
        "rate_up.weight",
        "gate_down.weight",
        "gate_up.weight",
        "value_down.weight",
        "value_up.weight",
    ),
    *(".filter.in_weight", ".filter.inner_weight", ".filter.out_weight"),
)
"""Ends of names without weight decay: scales, offsets, time constants, filters, meta tokens, and the embedding."""

INITIAL_STATE = "initial_state."
"""How the names of a learned initial state begin."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a peak learning rate and a weight decay."""

    name: str
    names: tuple[str, ...]
    learning_rate: float
    weight_decay: float


def touched_names(surgery: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the tensors that any record of surgery.json says it touched."""
    return frozenset(name for record in surgery for name in record.get("touched", ()))


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern names a parameter; the ``model.`` that most names begin with may be left out."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix("model."), pattern)


def trained_names(names: Sequence[str], recipe: OptimizerRecipe) -> list[str]:
    """Return the names that `train` and `freeze` leave to be trained, in order; a learned initial state always is.

    Raises:
        UserError: a pattern matches none of `names`, or nothing is left.
    """
    own = [name for name in names if not name.startswith(INITIAL_STATE)]
    for key in ("train", "freeze"):
        for index, pattern in enumerate(getattr(recipe, key)):
            _check_matches(f"optimizer.{key}.{index}", pattern, own)

    def trained(name: str) -> bool:
        chosen = not recipe.train or any(matches(name, pattern) for pattern in recipe.train)
        return chosen and not any(matches(name, pattern) for pattern in recipe.freeze)

    kept = [name for name in names if name.startswith(INITIAL_STATE) or trained(name)]
    if names and not kept:
        raise UserError("optimizer.freeze leaves nothing to train; freeze less")
    return kept


def freeze_parameters(model: nn.Module, recipe: OptimizerRecipe) -> list[str]:
    """Let the parameters that `train` and `freeze` leave out need no gradient; return the names of those that do.

    Raises:
        UserError: as `trained_names`.
    """
    if recipe.train or recipe.freeze:
        parameters = dict(model.named_parameters())
        kept = set(trained_names(list(parameters), recipe))
        for name, parameter in parameters.items():
            if name not in kept:
                parameter.requires_grad_(False)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _check_matches(key: str, pattern: str, names: Collection[str]) -> None:
    """Refuse a pattern that names nothing; the names nearest to it are told."""
    if not any(matches(name, pattern) for name in names):
        # Without its stars a pattern is near the names that it was meant for.
        literal = pattern.replace("*", "").strip(".")
        named = next((name for name in names if literal and f".{literal}." in f".{name}."), None)
        hint = f' Did you mean "{pattern.strip("*.")}.*"?' if named else did_you_mean(literal, names, 3, cutoff=0.3)
        raise UserError(f'{key} "{pattern}" matches no parameter that could be trained.{hint}')


def parameter_groups(
    names: Sequence[str], touched: frozenset[str], recipe: OptimizerRecipe, initial_state_rate: float = 0.0
) -> tuple[ParameterGroup, ...]:
    """Return the non-empty groups, in a fixed order; every name is in exactly one.

    The first rule of `rates` that matches a name holds for it; others have the rate of what surgery touched or kept. A
    learned initial state (names that begin with `INITIAL_STATE`) has a peak rate of its own and no decay.

    Raises:
        UserError: a rule of `rates` matches none of `names`.
    """
    learned = tuple(name for name in names if name.startswith(INITIAL_STATE))
    names = [name for name in names if not name.startswith(INITIAL_STATE)]
    for index, rule in enumerate(recipe.rates):
        _check_matches(f"optimizer.rates.{index}.match", rule.match, names)
    found: dict[tuple[int, bool, bool], list[str]] = {}
    for name in names:
        number = next((i for i, rule in enumerate(recipe.rates) if matches(name, rule.match)), -1)
        own = recipe.rates[number] if number >= 0 else None
        # What a rule decides does not part its members.
        is_touched = name in touched and (own is None or own.learning_rate is None)
        without_decay = name.endswith(NO_DECAY) and (own is None or own.weight_decay is None)
        found.setdefault((number, is_touched, without_decay), []).append(name)
    groups = [_group(*key, tuple(found[key]), recipe) for key in sorted(found)]
    if learned:
        groups.append(ParameterGroup("initial state", learned, initial_state_rate, 0.0))
    return tuple(groups)


def _group(
    rule_number: int, is_touched: bool, without_decay: bool, members: tuple[str, ...], recipe: OptimizerRecipe
) -> ParameterGroup:
    """Return the group of the members that a rule (-1 = none) and surgery treat alike."""
    rate = recipe.touched_rate if is_touched else recipe.learning_rate
    decay = 0.0 if without_decay else recipe.weight_decay
    labels = ["touched" if is_touched else "kept"]
    if rule_number >= 0:
        rule = recipe.rates[rule_number]
        own = recipe.rate_of(rule)
        labels = [rule.match, *(labels if own is None else [])]
        rate = rate if own is None else own
        decay = decay if rule.weight_decay is None else rule.weight_decay
    return ParameterGroup(", ".join(labels + ["no decay"] * without_decay), members, rate, decay)


def make_optimizer(model: nn.Module, groups: Sequence[ParameterGroup], recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of `model` (names as in a checkpoint)."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return torch.optim.AdamW(
        [
            {
                "params": [parameters[name] for name in group.names],
                "lr": group.learning_rate,
                "weight_decay": group.weight_decay,
                "name": group.name,
            }
            for group in groups
        ],
        betas=recipe.betas,
        eps=recipe.epsilon,
        # One call for all parameters: a small model has many tiny tensors, and looping over them would cost more.
        fused=True,
    )
