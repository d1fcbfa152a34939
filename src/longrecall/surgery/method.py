"""What a method of surgery is: what it declares, and the rules by which it refuses what it cannot do.

A method is two pure functions on one layer. `plan` sees descriptions only (so a dry run reads no weights) and says what
the layer becomes; `transform` makes its tensors. Tensor names are relative to the layer: `mixer_norm.weight`,
`mixer.q_proj.weight`. A new method is one file in `methods/` and one line in `registry.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.mixers.registry import MIXERS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longrecall.models.config import RecurrentConfig

INITS = ("preserve", "perturb", "handover", "reinit", "inherit")
"""Every way to fill an enlarged layer, in the order in which help texts list them."""

ANY_MIXER = ("any mixer",)
"""`mixers` of a method that fits every type (a layer in the middle of a handover apart)."""

MixerDescription = Mapping[str, Any]
"""A mixer as a RecurrentConfig holds it, every default written out: `{"type": "mamba2", "state_dim": 4, ...}`."""

Tensors = dict[str, "Tensor"]
"""Tensors of one layer, by their name relative to the layer."""


@dataclass(frozen=True)
class Option:
    """One setting of a method.

    `default` None means that the option stays away unless it is given; `default_by_init` overrules `default` for some
    inits. `excludes` names an option that this one cannot be given together with, and gives way to as a default.
    `flag` is its own argument of `longrecall expand` (``--chunk``), with `letter` for the value in the help text;
    without one, the option is given as ``--set name=value``. Methods may share a flag for options of one name.
    """

    name: str
    kind: type
    default: Any
    inits: tuple[str, ...]
    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    default_by_init: tuple[tuple[str, Any], ...] = ()
    excludes: str = ""
    flag: str = ""
    letter: str = ""

    def default_for(self, init: str) -> Any:
        """Return the value that holds when the user gives none."""
        return dict(self.default_by_init).get(init, self.default)

    def check(self, value: object) -> Any:
        """Return `value` in this option's type; raise UserError when it does not fit."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.kind:
            raise UserError(f"option {self.name}: {value!r} is not {_article(self.kind)}; it is the {self.help}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"option {self.name}: {value} is not finite")
        if self.choices and value not in self.choices:
            hint = did_you_mean(str(value), self.choices)
            raise UserError(f'option {self.name}: "{value}" is none of {", ".join(self.choices)}.{hint}')
        if isinstance(value, (int, float)):
            if self.least is not None and value < self.least:
                raise UserError(f"option {self.name}: {value} is too small; it must be at least {self.least:g}")
            if self.above is not None and value <= self.above:
                raise UserError(f"option {self.name}: {value} is too small; it must be above {self.above:g}")
            if self.most is not None and value > self.most:
                raise UserError(f"option {self.name}: {value} is too large; it must be at most {self.most:g}")
        return value


@dataclass(frozen=True)
class Plan:
    """What a layer becomes: its new mixer description, the relative names that surgery touched, and warnings."""

    mixer: dict[str, Any]
    touched: tuple[str, ...]
    warnings: tuple[str, ...] = ()


PlanFunction = Callable[[MixerDescription, str, Mapping[str, Any]], Plan]
TransformFunction = Callable[[MixerDescription, Tensors, str, Mapping[str, Any], "torch.Generator"], Tensors]
ModelCheck = Callable[["RecurrentConfig", Mapping[str, Any]], None]


@dataclass(frozen=True)
class Method:
    """A way to enlarge a memory: the mixers it fits, its inits and options, and its two functions.

    `plan(mixer, init, options)` raises UserError (without a place; the caller adds the layer) when the layer cannot be
    enlarged. `transform(mixer, tensors, init, options, generator)` gets every tensor of the layer under `mixer.` and
    `mixer_norm.weight`, and returns the complete new set; it changes no tensor in place.
    """

    name: str
    summary: str
    mixers: tuple[str, ...]
    inits: tuple[str, ...]
    options: tuple[Option, ...]
    plan: PlanFunction
    transform: TransformFunction
    senseless: tuple[tuple[str, str], ...] = ()
    """Inits of `INITS` that could mean nothing here, each with the reason."""
    check_model: ModelCheck | None = None
    """Raises UserError when the options do not fit the whole model, whose config it gets; None: they always do."""
    mixer_names: str = ""
    """The mixers as people write them, for help texts: `GLA, RetNet`. Empty: the names of `mixers`."""

    @property
    def fitting(self) -> str:
        """The mixers that it fits, in words."""
        return self.mixer_names or ", ".join(self.mixers)

    def fits(self, kind: str) -> bool:
        """Return whether layers of mixer type `kind` can have this surgery."""
        if self.mixers == ANY_MIXER:
            return not (kind in MIXERS and MIXERS[kind].positionwise)
        return kind in self.mixers

    def check_init(self, init: str) -> None:
        """Raise UserError when `init` is no init of this method."""
        if init not in self.inits:
            if init in dict(self.senseless):
                reason = dict(self.senseless)[init]
                raise UserError(f"init {init} does not fit {self.name}: {reason}; use {', '.join(self.inits)}")
            hint = did_you_mean(init, self.inits)
            raise UserError(f'init "{init}" is unknown to {self.name}; it knows {", ".join(self.inits)}.{hint}')

    def check_options(self, init: str, given: Mapping[str, object]) -> dict[str, Any]:
        """Return the complete options for `init`, defaults filled in; raise UserError on one that does not belong."""
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                raise UserError(f'{self.name} has no option "{name}"; it has {", ".join(known)}.{hint}')
            if init not in known[name].inits:
                fits = ", ".join(known[name].inits)
                raise UserError(f'option {name} of {self.name} does nothing with init "{init}"; it belongs to {fits}')
        asked = {name: value for name, value in given.items() if value is not None}
        values: dict[str, Any] = {}
        for name, option in known.items():
            if name in asked and option.excludes in asked:
                raise UserError(f"options {option.excludes} and {name} set the same thing; give only one of them")
            if name in asked:
                values[name] = option.check(asked[name])
            elif init in option.inits and option.default_for(init) is not None and option.excludes not in asked:
                values[name] = option.default_for(init)
        return values


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]
