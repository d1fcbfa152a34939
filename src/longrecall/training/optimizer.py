"""AdamW with one learning rate for what surgery touched and one for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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


def parameter_groups(
    names: Sequence[str], touched: frozenset[str], recipe: OptimizerRecipe, initial_state_rate: float = 0.0
) -> tuple[ParameterGroup, ...]:
    """Return the non-empty groups, in a fixed order; every name is in exactly one.

    A learned initial state (names that begin with `INITIAL_STATE`) has a peak rate of its own and no decay.
    """
    groups = []
    learned = tuple(name for name in names if name.startswith(INITIAL_STATE))
    names = [name for name in names if not name.startswith(INITIAL_STATE)]
    for is_touched, label, rate in ((False, "kept", recipe.learning_rate), (True, "touched", recipe.touched_rate)):
        for decays in (True, False):
            members = tuple(n for n in names if (n in touched) is is_touched and (not n.endswith(NO_DECAY)) is decays)
            if members:
                name = label if decays else f"{label}, no decay"
                groups.append(ParameterGroup(name, members, rate, recipe.weight_decay if decays else 0.0))
    if learned:
        groups.append(ParameterGroup("initial state", learned, initial_state_rate, 0.0))
    return tuple(groups)


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
