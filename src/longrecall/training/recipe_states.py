"""The interventions on the initial state that a recipe can name, one dataclass a kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from longrecall.errors import UserError
from longrecall.units import parse_length
from longrecall.value_rules import one_of, positive, share


@dataclass(frozen=True)
class ZeroState:
    """Every sequence starts from the zero state."""

    kind: ClassVar[str] = "zero"


@dataclass(frozen=True, kw_only=True)
class InterventionRecipe:
    """What every intervention has."""

    kind: ClassVar[str] = ""

    probability: float = 1.0
    """Probability that a sequence gets the state of the intervention; otherwise it starts from zero."""
    convolution: bool = True
    """The states of the short convolutions take part too."""

    def __post_init__(self) -> None:
        share(self, "probability")
        window = getattr(self, "attention_window", None)
        if window is not None and window < 1:
            raise UserError(f"attention_window must be at least 1 token, got {window}; leave it out for none")
        limit = getattr(self, "clip_norm", None)
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise UserError(f"clip_norm must be above 0, got {limit}; leave it out for no limit")


@dataclass(frozen=True, kw_only=True)
class StatePassingRecipe(InterventionRecipe):
    """A sequence starts from the final state of the same row of the previous, unrelated batch."""

    kind: ClassVar[str] = "state_passing"

    text_only: bool = False
    """Only running text gets the state; sequences of tasks (phone books, pass keys) start from zero."""
    clip_norm: float | None = None
    """Largest Frobenius norm of a passed recurrent state, per sequence, layer and head; none = as it is."""
    attention_window: Annotated[int, parse_length] | None = None
    """This many last tokens of the sequence that the state comes from stay visible to attention layers; none = none of
    them."""


@dataclass(frozen=True, kw_only=True)
class TruncatedBpttRecipe(InterventionRecipe):
    """A row continues its text where it stopped in the batch before, from the state it had there."""

    kind: ClassVar[str] = "truncated_bptt"

    attention_window: Annotated[int, parse_length] | None = None
    """This many tokens of the text before the row stay visible to attention layers; none = none of them."""


@dataclass(frozen=True, kw_only=True)
class NoiseRecipe(InterventionRecipe):
    """A sequence starts from Gaussian noise, one standard deviation for every layer and head."""

    kind: ClassVar[str] = "noise"

    std: float
    """Standard deviation of every number of the state."""
    convolution: bool = False
    """The states of the short convolutions are noise too, of the same standard deviation."""
    text_only: bool = False
    """Only running text gets the state; sequences of tasks (phone books, pass keys) start from zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "std")


@dataclass(frozen=True, kw_only=True)
class FittedNoiseRecipe(InterventionRecipe):
    """A sequence starts from Gaussian noise with the mean and deviation of the final states of its layer and head."""

    kind: ClassVar[str] = "fitted_noise"

    average: str = "exponential"
    """Average over the batches so far: exponential (the newest count most) or cumulative (all count the same)."""
    decay: float = 0.99
    """With average exponential: the share of a batch's weight that is left after the next batch."""
    text_only: bool = False
    """Only running text gets the state; sequences of tasks (phone books, pass keys) start from zero."""
    clip_norm: float | None = None
    """Largest Frobenius norm of a drawn recurrent state, per sequence, layer and head; none = as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("average", self.average, ("exponential", "cumulative"))
        if not 0.0 < self.decay < 1.0:
            raise UserError(f"decay must lie between 0 and 1, got {self.decay}; use average: cumulative for no decay")


@dataclass(frozen=True, kw_only=True)
class LearnedRecipe(InterventionRecipe):
    """Every sequence starts from one trainable state; with frozen weights this is state tuning."""

    kind: ClassVar[str] = "learned"

    freeze: bool = True
    """Train the state alone and leave the weights as they are."""
    learning_rate: float = 0.01
    """Peak learning rate of the state; it follows the schedule of the optimizer section and has no weight decay."""
    text_only: bool = False
    """Only running text gets the state; sequences of tasks (phone books, pass keys) start from zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "learning_rate")


AnyIntervention = StatePassingRecipe | TruncatedBpttRecipe | NoiseRecipe | FittedNoiseRecipe | LearnedRecipe
AnyInitialState = ZeroState | AnyIntervention
INITIAL_STATES: dict[str, type] = {
    state.kind: state
    for state in (ZeroState, NoiseRecipe, FittedNoiseRecipe, StatePassingRecipe, TruncatedBpttRecipe, LearnedRecipe)
}
