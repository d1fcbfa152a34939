"""The section `leash` of a recipe: which model the trained one stays close to, where, and how strongly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.registry import TRAINING_SOURCES
from longrecall.training.recipe_sources import AnySource
from longrecall.units import parse_length
from longrecall.value_rules import one_of, positive

GROUPS = ("all", "text", "tasks")
"""What `sources` calls every source, those of running text (of any kind), and those that tasks make."""


@dataclass(frozen=True)
class LeashRecipe:
    """Keeps what the model predicts close to a teacher: by default, the model before surgery."""

    teacher: str | None = None
    """Folder (or hub id) of a checkpoint with the same vocabulary; none = what the last surgery started from."""
    weight: float = 1.0
    """Weight of KL(teacher || model) per token, where the loss of a label has weight 1."""
    sources: tuple[str | int, ...] = ("text",)
    """Sequences that the leash applies to: all, text (running text), tasks, a kind of source, or the number of a
    source."""
    tokens: str = "all"
    """Which tokens of these sequences: all, or labelled: only those that the loss counts."""
    instead: bool = False
    """These tokens have no other loss: their labels are left out, though they still count in the mean."""
    length: Annotated[int, parse_length] | None = None
    """Only the first tokens of a sequence, this many; none = all of them."""
    temperature: float = 1.0
    """Both logits are divided by it: above 1, unlikely tokens count more."""
    top_k: int | None = None
    """The teacher's k likeliest tokens count one by one, all others together as one; none = every token counts by
    itself."""
    hidden: float = 0.0
    """Weight of the squared distance of the residual streams after every layer, relative to the teacher's length."""
    dtype: str | None = None
    """Type of the teacher's weights; none = model.dtype."""
    sha256: str | None = None
    """SHA-256 of the teacher's files; another teacher is refused. A run fills it in and resumes only with the same
    one."""

    def __post_init__(self) -> None:
        one_of("tokens", self.tokens, ("all", "labelled"))
        positive(self, "temperature")
        for name in ("weight", "hidden"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.weight == self.hidden == 0.0:
            raise UserError(
                "weight and hidden are both 0, so the leash has no effect; leave leash out to switch it off"
            )
        for name in ("top_k", "length"):
            if getattr(self, name) is not None:
                positive(self, name)
        if self.length is not None and self.length < 2:
            raise UserError("length must be at least 2 tokens: a token is predicted from one before it")
        if self.dtype is not None:
            one_of("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        if not self.sources:
            raise UserError(f"sources is empty; it takes {', '.join(GROUPS)}, kinds of sources or their numbers")

    def chosen(self, sources: Sequence[AnySource]) -> tuple[bool, ...]:
        """Return which of the sources it holds for; UserError for a name in `sources` that means none of them."""
        found = [False] * len(sources)
        for name in self.sources:
            own = [_means(name, number, source.kind) for number, source in enumerate(sources)]
            if not any(own):
                known = tuple(dict.fromkeys((*GROUPS, *(source.kind for source in sources))))
                raise UserError(
                    f'leash.sources "{name}" is none of data.sources; it takes {", ".join(known)} or a number from 0 '
                    f"to {len(sources) - 1}.{did_you_mean(str(name), known)}"
                )
            found = [one or other for one, other in zip(found, own, strict=True)]
        return tuple(found)

    def in_words(self) -> str:
        """Say in a line what is held, where."""
        weights = [f"weight {self.weight:g}"] + ([f"hidden {self.hidden:g}"] if self.hidden else [])
        return f"divergence from {self.teacher} on {', '.join(map(str, self.sources))}, {', '.join(weights)}"


def _means(name: str | int, number: int, kind: str) -> bool:
    """Whether a name in `sources` means the source of this number and kind."""
    groups = {"all": True, "text": kind not in TRAINING_SOURCES, "tasks": kind in TRAINING_SOURCES}
    return groups.get(str(name), name in (kind, number, str(number)))
