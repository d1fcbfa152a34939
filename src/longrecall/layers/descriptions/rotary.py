"""By which angles rotary position embeddings turn (Su et al. 2021), and how they are stretched to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeGuard

from longrecall.errors import UserError, did_you_mean

LINEAR, DYNAMIC, YARN, LONGROPE, LLAMA3 = "linear", "dynamic", "yarn", "longrope", "llama3"

_NEEDED: Mapping[str, tuple[str, ...]] = {
    LINEAR: ("factor",),
    DYNAMIC: ("factor", "max_position_embeddings"),
    YARN: ("original_max_position_embeddings",),
    LONGROPE: ("original_max_position_embeddings", "short_factor", "long_factor"),
    LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_MAY: Mapping[str, tuple[str, ...]] = {
    YARN: (
        *("factor", "max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim"),
    ),
    LONGROPE: ("factor", "max_position_embeddings", "attention_factor"),
}
KINDS = tuple(_NEEDED)
"""Ways to stretch the angles, by the names that transformers' configs have for them."""

LARGEST = 1e18


def fields_of(kind: str) -> tuple[str, ...]:
    """The fields besides `rope_type` that a kind has a use for."""
    return (*_NEEDED[kind], *_MAY.get(kind, ()))


@dataclass(frozen=True)
class RopeScaling:
    """How the angles of a rotation are stretched. Fields have the names of transformers' `rope_parameters`.

    "dynamic" and "longrope" depend on the length read so far. Here that is the position of the token: a token is turned
    as it is when text is read token by token, whatever is read in one pass. transformers turns a whole pass by its last
    position, so that reading in one pass and token by token differ there, past the original length.

    Raises:
        UserError: an unknown kind, a field that is missing or has no use, or a value that cannot be.
    """

    rope_type: str
    """One of `KINDS`."""
    factor: float | None = None
    """How many times the original length the context has; None (yarn, longrope) = the ratio of the two lengths."""
    original_max_position_embeddings: int | None = None
    """Tokens of context in pretraining."""
    max_position_embeddings: int | None = None
    """Tokens of context now; for "dynamic" those from which on angles are stretched."""
    attention_factor: float | None = None
    """What queries and keys are multiplied by; None = as the kind has it."""
    beta_fast: float | None = None
    """yarn: turns within the original length above which a pair keeps its angle; None = 32."""
    beta_slow: float | None = None
    """yarn: turns below which a pair's angle is divided by the factor; None = 1."""
    truncate: bool = True
    """yarn: round the bounds between the two to whole pairs."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """yarn in DeepSeek's form: weights of log(factor) in the attention factor and in the scale of the scores."""
    short_factor: tuple[float, ...] | None = None
    """longrope: what the angle of every pair is divided by up to the original length."""
    long_factor: tuple[float, ...] | None = None
    """longrope: the same past the original length."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    """llama3: turns within the original length below which, and above which, all or nothing is stretched."""

    def __post_init__(self) -> None:
        if self.rope_type not in KINDS:
            hint = did_you_mean(str(self.rope_type), KINDS)
            raise UserError(f'rope_scaling: unknown rope_type "{self.rope_type}"; there are {", ".join(KINDS)}.{hint}')
        needed = _NEEDED[self.rope_type]
        used = {"rope_type", *fields_of(self.rope_type)}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in needed and value is None:
                raise UserError(f'rope_scaling: "{self.rope_type}" needs "{field.name}"')
            if value != field.default and field.name not in used:
                raise UserError(f'rope_scaling: "{self.rope_type}" has no use for "{field.name}"; leave it out')
            if value is not None and field.name != "rope_type":
                self._check(field.name, value)
        if self.factor is None and self.rope_type in _MAY and self.max_position_embeddings is None:
            raise UserError(f'rope_scaling: "{self.rope_type}" needs "factor", or "max_position_embeddings" to find it')
        if self.rope_type == LLAMA3 and not self.number("high_freq_factor") > self.number("low_freq_factor"):
            raise UserError('rope_scaling: "high_freq_factor" must be above "low_freq_factor"')

    def _check(self, name: str, value: object) -> None:
        if name == "truncate":
            fine = isinstance(value, bool)
            kind = "true or false"
        elif name in ("short_factor", "long_factor"):
            fine = _is_list(value) and all(_is_positive(item) for item in value)
            kind = "a list of numbers above 0"
            object.__setattr__(self, name, tuple(value) if fine and _is_list(value) else None)
        elif name.endswith("embeddings"):
            fine = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
            kind = "a positive whole number below 2147483648"
        elif name.startswith("mscale"):
            fine = value == 0 or _is_positive(value)
            kind = "a number of at least 0"
        else:
            fine, kind = _is_positive(value), "a finite number above 0"
        if not fine:
            raise UserError(f'rope_scaling: "{name}" is {value!r}; it must be {kind}')

    @classmethod
    def from_dict(cls, description: object) -> Self:
        """Build from plain data; raises UserError on an unknown or missing key, or a value that cannot be."""
        known = [field.name for field in fields(cls)]
        if not isinstance(description, Mapping) or "rope_type" not in description:
            raise UserError(
                f'rope_scaling must be a mapping such as {{"rope_type": "linear", "factor": 4.0}}: {description!r}'
            )
        for key in description:
            if key not in known:
                raise UserError(f'rope_scaling has no field "{key}".{did_you_mean(str(key), known)}')
        return cls(**description)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, without what has its default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {field.name: plain[field.name] for field in fields(self) if values[field.name] != field.default}

    def number(self, name: str) -> float:
        """The value of a field that the kind needs, as a float."""
        value = getattr(self, name)
        assert value is not None
        return float(value)

    @property
    def stretch(self) -> float:
        """The factor, given or the ratio of the two lengths."""
        if self.factor is not None:
            return float(self.factor)
        return self.number("max_position_embeddings") / self.number("original_max_position_embeddings")

    @property
    def turned_by_position(self) -> bool:
        """Whether angles are no fixed number of radians a token."""
        return self.rope_type in (DYNAMIC, LONGROPE)

    @property
    def magnitude(self) -> float:
        """What turned queries and keys are multiplied by."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.rope_type == LONGROPE:
            length = self.number("original_max_position_embeddings")
            return 1.0 if self.stretch <= 1 or length <= 1 else math.sqrt(1 + math.log(self.stretch) / math.log(length))
        if self.rope_type == YARN:
            if self.mscale and self.mscale_all_dim:
                return _mscale(self.stretch, self.mscale) / _mscale(self.stretch, self.mscale_all_dim)
            return _mscale(self.stretch, 1.0)
        return 1.0

    @property
    def score_factor(self) -> float:
        """What DeepSeek's attention multiplies its scores by besides (`mscale_all_dim`)."""
        return _mscale(self.stretch, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True)
class Rotation:
    """Which channels of a head are turned, and by how many radians a token: pairs (i, i + pairs) of the first ones."""

    dim: int
    """R: the exponents are -2 i / R. An odd R turns R + 1 channels."""
    theta: float
    scaling: RopeScaling | None = None

    @property
    def pairs(self) -> int:
        """Pairs of channels that are turned."""
        return (self.dim + 1) // 2

    @property
    def channels(self) -> int:
        """Channels that are turned, the first ones of a head."""
        return 2 * self.pairs

    @property
    def magnitude(self) -> float:
        """What turned channels are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def check(self) -> None:
        """Raise UserError where the scaling does not fit so many channels, or asks for what has no value."""
        scaling = self.scaling
        if scaling is None:
            return
        for name in ("short_factor", "long_factor"):
            values = getattr(scaling, name)
            if values is not None and len(values) != self.pairs:
                raise UserError(f'rope_scaling: "{name}" has {len(values)} numbers; there are {self.pairs} pairs')
        if scaling.rope_type == DYNAMIC and self.dim <= 2:
            raise UserError('rope_scaling: "dynamic" needs more than 2 channels to turn')
        if scaling.rope_type == YARN and self.theta <= 1:
            raise UserError('rope_scaling: "yarn" needs a rope_theta above 1')

    def radians(self) -> tuple[tuple[float, ...], ...]:
        """Radians a token of every pair, in one row; where they depend on the position, with a second row.

        That is for "longrope" the radians past the original length, for "dynamic" the power of the stretched length by
        which a pair's radians are multiplied.
        """
        plain = [self.theta ** (-2 * i / self.dim) for i in range(self.pairs)]
        scaling = self.scaling
        if scaling is None:
            return (tuple(plain),)
        if scaling.rope_type == LINEAR:
            return (tuple(x / scaling.stretch for x in plain),)
        if scaling.rope_type == DYNAMIC:
            return tuple(plain), tuple(-2 * i / (self.dim - 2) for i in range(self.pairs))
        if scaling.rope_type == LONGROPE:
            assert scaling.short_factor is not None and scaling.long_factor is not None
            rows = (scaling.short_factor, scaling.long_factor)
            short, long = (tuple(x / by for x, by in zip(plain, row, strict=True)) for row in rows)
            return short, long
        stretched = self._yarn if scaling.rope_type == YARN else self._llama3
        return (tuple(stretched(scaling, plain)),)

    def _yarn(self, scaling: RopeScaling, plain: list[float]) -> list[float]:
        """Peng et al. 2023, section 3.2: pairs that turn often keep their radians, slow ones are stretched."""
        length = scaling.number("original_max_position_embeddings")

        def pair_of(turns: float) -> float:
            return self.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(scaling.beta_fast or 32), pair_of(scaling.beta_slow or 1)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        shares = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(self.pairs)]
        return [x * (1 - share) + x / scaling.stretch * share for x, share in zip(plain, shares, strict=True)]

    def _llama3(self, scaling: RopeScaling, plain: list[float]) -> list[float]:
        """Llama 3.1: between two numbers of turns within the original length, a straight line."""
        length = scaling.number("original_max_position_embeddings")
        least, most = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        turns = [length * x / (2 * math.pi) for x in plain]
        shares = [min(max((n - least) / (most - least), 0.0), 1.0) for n in turns]
        return [x * share + x / scaling.stretch * (1 - share) for x, share in zip(plain, shares, strict=True)]


def rotation(width: int, share: float, theta: float, scaling: RopeScaling | None) -> Rotation | None:
    """How a head of `width` channels is turned; None = not at all.

    Raises:
        UserError: more channels would be turned than there are, or the scaling does not fit.
    """
    dim = int(width * share)
    if not dim:
        return None
    found = Rotation(dim, theta, scaling)
    if found.channels > width:
        raise UserError(f"{dim} channels of a head are turned in pairs; make that number even (head width {width})")
    found.check()
    return found


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
