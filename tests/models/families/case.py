"""One configuration of a family: how its model is made, and by what it is told from the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 61


@dataclass(frozen=True)
class Case:
    """A tiny model of transformers' own class.

    Attributes:
        format: the format's name in longrecall.
        name: what is special about this configuration.
        build: makes the model; weights are drawn anew by `filled`.
        scale: standard deviation of the weights that are drawn, so that logits are of size 1 to 5.
        special: parameters by a part of their name -> how they are drawn instead: (mean, deviation).
    """

    format: str
    name: str
    build: Callable[[], Any]
    scale: float = 0.25
    special: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.format}-{self.name}"


def case_of(family: str, name: str) -> Case:
    """The configuration `name` in the file `family`."""
    cases: list[Case] = importlib.import_module(f"tests.models.families.{family}").CASES
    return next(case for case in cases if case.name == name)


def filled(case: Case, seed: int = 0) -> Any:
    """The model in evaluation mode, float32, every weight drawn, those of norms and biases too."""
    torch.manual_seed(seed)
    model = case.build().float().eval()
    generator, stored = torch.Generator().manual_seed(seed), model.state_dict()
    with torch.no_grad():
        for name, parameter in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
            # Constants that follow from the config, such as frequencies, are in no file.
            if not parameter.is_floating_point() or name not in stored:
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            special = next((how for part, how in case.special.items() if part in name), None)
            if special is not None:
                parameter.copy_(special[0] + special[1] * drawn)
            elif "norm" in name and parameter.dim() == 1:
                parameter += 0.3 * drawn
            elif parameter.dim() == 1:
                parameter += 0.2 * drawn
            else:
                parameter.copy_(case.scale * drawn)
    return model
