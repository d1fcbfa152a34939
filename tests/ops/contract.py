"""The table of `test_contract.py`: how to call every op, with which inputs, and what it promises.

An op joins by one row. What all ops promise is in the test; what only one family promises is in that family's folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from longrecall.ops import (
    best_chunks,
    bonus_linear_attention,
    linear_recurrence,
    long_convolution,
    selected_attention,
    selective_scan,
    short_convolution,
    weighted_average,
)
from longrecall.ops.backends import OPS
from longrecall.ops.convolution.diagonal import diagonal_taps
from longrecall.ops.convolution.head_products import pair_products, read_pairs
from longrecall.ops.convolution.short import gated_short_convolution
from longrecall.ops.delta_rule.gates import delta_gates
from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from longrecall.ops.linear_attention.bonus import add_bonus
from longrecall.ops.linear_attention.stepped_values import stepped_values
from longrecall.ops.norms import op as norms
from longrecall.ops.projections.biased import column_sums
from longrecall.ops.projections.embedding import look_up
from longrecall.ops.time_mixing.op import gated_group_norm, mix_with_previous
from tests.ops.test_recurrences import CASES, make

Inputs = dict[str, Tensor | None]

Tolerances = Mapping[torch.dtype, float]
"""Dtype -> norm of an error over the norm."""

LOOSEST: Tolerances = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
"""float64 and float32: sums of a few hundred terms, and up to four products one after the other, in another order.
Otherwise operands and results are rounded to 11 or 8 bits (5e-4 or 4e-3 at worst), a few times one after the other."""
LINEAR = {**LOOSEST, torch.float32: 5e-6}
"""Sums alone."""
ROUNDED_ONCE = {**LINEAR, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""All before a result is float32."""
ELEMENTWISE = {**LOOSEST, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Results and what is kept are rounded to 11 or 8 bits, 2.8e-4 or 2.3e-3 of the norm each, two or three of them."""


@dataclass(frozen=True)
class Row:
    """An op, in one of the ways to call it."""

    op: str
    """Its name in the registry; an op that others are made of has the name of the one that decides."""
    call: Callable[..., Any]
    """Tensors by name, `backend` and what `options` name -> a result or several; a state comes last."""
    inputs: Callable[[Generator, int, int], Inputs]
    """Generator, rows of the batch and tokens -> float32 tensors; integers and None stay what they are."""
    state: str | None = None
    """The argument that carries what earlier tokens left; None = tokens are read in one call."""
    timeless: tuple[str, ...] = ()
    """Arguments without an axis of rows and one of tokens, beside the state."""
    wide: tuple[str, ...] = ()
    """Arguments that are float32 also where the others are narrower: decays, rates and states."""
    lengths: tuple[int, ...] = (21,)
    """Numbers of tokens for the kernels."""
    plain_lengths: tuple[int, ...] = (1, 21)
    """The same for backends in plain torch."""
    packs: bool = False
    """Whether it takes documents one after the other in one row, by `cu_seqlens`."""
    masks: bool = False
    """Whether it takes a `mask` of real tokens."""
    differentiable: bool = True
    flat: bool = False
    """Whether rows and tokens are one axis, or it has none of them: no empty batch, no handing over."""
    around: bool = False
    """Whether functions of torch work before or after the kernels."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Backend -> why it does not serve such calls."""
    tolerance: Tolerances = field(default_factory=lambda: ELEMENTWISE)
    small: Mapping[str, int] = field(default_factory=dict)
    """Constants of the kernels that make several tiles, chunks or programs of few tokens."""

    @property
    def backends(self) -> list[str]:
        """The backends that are held against the definition; peers are other people's, and often not installed."""
        return [name for name in OPS[self.op].backends() if name in ("chunked", "triton") and name not in self.refuses]


def draw(g: Generator, **shapes: tuple[int, ...]) -> Inputs:
    """Normal numbers, by name."""
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


NAMES = {
    "generalised_delta": ("q", "k", "v", "log_decay", "removal", "replacement", "initial_state"),
    "delta": ("q", "k", "v", "log_decay", "beta", "initial_state"),
    "merged": ("q", "k", "v", "log_decay", "mixing", "initial_state"),
    "linear": ("q", "k", "v", "log_decay", "initial_state"),
}


def recurrence(case: str) -> Row:
    """A row of `make`'s cases: one op with each kind of decay."""
    kind = "delta" if case in ("delta", "gated_delta", "channel_delta") else case.partition("_")[0]
    names = NAMES.get(case, NAMES.get(kind, NAMES["linear"]))
    op, _ = make(case, 1, torch.float32)

    def inputs(g: Generator, rows: int, tokens: int) -> Inputs:
        heads = 4 if case == "grouped" else 2
        drawn = make(case, tokens, torch.float32, seed=int(g.initial_seed()), sizes=(rows, heads, 5, 7))[1]
        return dict(zip(names, drawn, strict=True))

    return Row(
        op.__name__,
        op,
        inputs,
        state="initial_state",
        timeless=("mixing",),
        wide=names[3:],
        lengths=(1, 45),
        plain_lengths=(1, 5, 16, 63, 64, 65, 130),
        packs=True,
        refuses={"triton": "one decay per head, not one per key channel"} if case == "channel_delta" else {},
        tolerance=LOOSEST if "delta" in case else LINEAR,
        small={"linear_attention.triton.chunked.CHUNK": 32},
    )


def bonus(g: Generator, rows: int, tokens: int) -> Inputs:
    """Decays between 0 and -1."""
    wide, narrow = (rows, tokens, 3, 5), (rows, tokens, 3, 4)
    drawn = draw(g, r=narrow, k=narrow, v=wide, bonus=(3, 4), initial_state=(rows, 3, 4, 5))
    return drawn | {"log_decay": -torch.rand(narrow, generator=g)}


def scan(g: Generator, rows: int, tokens: int) -> Inputs:
    """Steps and rates that are positive, decays of up to 1 a step."""
    drawn = draw(g, x=(rows, tokens, 7), b=(rows, tokens, 3), c=(rows, tokens, 3), skip=(7,))
    drawn |= draw(g, initial_state=(rows, 3, 7))
    return drawn | {"step": torch.rand(rows, tokens, 7, generator=g), "a": -torch.rand(7, 3, generator=g)}


def average(g: Generator, rows: int, tokens: int) -> Inputs:
    """A state of which one channel has read nothing."""
    drawn = draw(g, k=(rows, tokens, 5), v=(rows, tokens, 5), bonus=(5,), initial_state=(rows, 3, 5))
    state = drawn["initial_state"]
    assert state is not None
    state[:, 2] = torch.arange(5).sign()
    state[:, :, 0] = 0
    return drawn | {"log_decay": -torch.rand(rows, tokens, 5, generator=g)}


def subheads(g: Generator, rows: int, tokens: int) -> Inputs:
    """Two key heads that share two values each, and a weak decay, which hides nothing."""
    drawn = draw(g, q=(rows, tokens, 2, 16), k=(rows, tokens, 2, 16), v=(rows, tokens, 2, 16), weights=(2, 2))
    drawn |= draw(g, initial_state=(rows, 4, 16, 16))
    drawn |= {name: torch.nn.functional.normalize(drawn[name], dim=-1) for name in ("q", "k")}
    gates = (rows, tokens, 4)
    return drawn | {"log_decay": -0.02 * torch.rand(gates, generator=g), "beta": torch.rand(gates, generator=g)}


def attention(g: Generator, rows: int, tokens: int) -> Inputs:
    """Two of five chunks of three keys for every query, now and then none."""
    drawn = draw(g, q=(rows, tokens, 2, 5), k=(rows, 15, 1, 5), v=(rows, 15, 1, 5), weights=(rows, tokens, 2))
    order = torch.rand(rows, tokens, 5, generator=g).argsort(-1)[..., :2]
    return drawn | {"chunks": order.masked_fill(torch.rand(order.shape, generator=g) < 0.2, -1)}


def choice(g: Generator, rows: int, tokens: int) -> Inputs:
    """Of six chunks, so many have ended when a query comes."""
    drawn = draw(g, queries=(rows, tokens, 5), vectors=(rows, 6, 5))
    return drawn | {"finished": (torch.arange(tokens) // 3).clamp(max=6).expand(rows, tokens).clone()}


def taps(g: Generator, rows: int, tokens: int) -> Inputs:
    """Eigenvalues as in H3."""
    step = torch.exp(-7 + 4.6 * torch.rand(2, 1, generator=g))
    rate = step / 2 * torch.exp(torch.randn(2, 35, generator=g) / 4)
    return {"rate": rate, "angle": step * torch.pi * torch.arange(35)} | draw(g, gain=(2, 35, 2))


def filters(g: Generator, rows: int, tokens: int, before: int) -> Inputs:
    """Taps that fade, and inputs from before where there are any."""
    fading = torch.exp(-3 * torch.arange(9) / 9)
    drawn = draw(g, x=(rows, tokens, 6)) | (draw(g, history=(rows, before, 6)) if before else {})
    return drawn | {"taps": torch.randn(6, 9, generator=g) * fading}


def table_and_ids(g: Generator, rows: int, tokens: int) -> Inputs:
    """More than half of the ids are one token."""
    ids = torch.randint(0, 50, (rows, tokens), generator=g)
    return draw(g, table=(50, 5)) | {"ids": ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.6, 3)}


def added_bonus(g: Generator, rows: int, tokens: int) -> Inputs:
    """What a recurrence has read and its first step, beside the tokens."""
    wide, narrow = (rows, tokens, 3, 24), (rows, tokens, 3, 8)
    return draw(g, reads=wide, first=(rows, 1, 3, 24), r=narrow, k=narrow, v=wide, bonus=(3, 8))


def summed(values: Tensor, step: Tensor, skip: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    """`stepped_values` around a recurrence that is no more than a sum over time."""
    return stepped_values(values, step, skip, lambda x: (x.cumsum(1) / 4, x.sum(1)), backend=backend)


def norm_row(op: str, function: Callable[..., Any], *matrices: str, **options: Any) -> Row:
    """A norm in three groups of 24."""

    def inputs(g: Generator, rows: int, tokens: int) -> Inputs:
        named = {name: (rows, tokens, 72) for name in ("x", "update", "gate") if name in matrices}
        found = draw(g, **named, weight=(72,))
        return found | ({"matrix": torch.randn(16, 72, generator=g) / 72**0.5} if "matrix" in matrices else {})

    small = {"norms.triton.rms_norm.TILE": 64, "norms.triton.gated.BACKWARD_TILE": 64}
    call = partial(function, eps=1e-5, groups=3, **options)
    return Row(op, call, inputs, timeless=("weight", "matrix"), small=small)


TABLE: dict[str, Row] = {case: recurrence(case) for case in CASES}
TABLE |= {
    "subheads": Row(
        "subhead_delta_rule",
        subhead_delta_rule,
        subheads,
        state="initial_state",
        timeless=("weights",),
        wide=("log_decay", "beta", "weights", "initial_state"),
        tolerance=LOOSEST,
    ),
    "bonus": Row(
        "gated_linear_attention",
        bonus_linear_attention,
        bonus,
        state="initial_state",
        timeless=("bonus",),
        wide=("log_decay", "bonus", "initial_state"),
        lengths=(2, 21),
        plain_lengths=(2, 16, 65),
        tolerance=LINEAR,
        packs=True,
    ),
    "selective_scan": Row(
        "selective_scan",
        selective_scan,
        scan,
        state="initial_state",
        timeless=("a", "skip"),
        wide=("a", "initial_state"),
        lengths=(1, 8, 9, 26),
        plain_lengths=(1, 16, 17, 130),
        packs=True,
        small={"scan.triton.selective_scan.CHUNK": 8},
        tolerance=ROUNDED_ONCE,
    ),
    "linear_recurrence": Row(
        "linear_recurrence",
        linear_recurrence,
        lambda g, rows, tokens: (
            draw(g, x=(rows, tokens, 7), initial_state=(rows, 7))
            | {"log_decay": -torch.rand(rows, tokens, 7, generator=g)}
        ),
        state="initial_state",
        wide=("log_decay", "initial_state"),
        lengths=(1, 70),
        plain_lengths=(1, 16, 17, 130),
        packs=True,
        tolerance=LINEAR,
    ),
    "weighted_average": Row(
        "weighted_average",
        weighted_average,
        average,
        state="initial_state",
        timeless=("bonus",),
        wide=("log_decay", "bonus", "initial_state"),
        lengths=(1, 70),
        plain_lengths=(1, 16, 17, 130),
        packs=True,
        around=True,
        tolerance=LINEAR,
    ),
    "short_convolution": Row(
        "short_convolution",
        short_convolution,
        lambda g, rows, tokens: draw(g, x=(rows, tokens, 32), weight=(32, 4), bias=(32,), state=(rows, 32, 3)),
        state="state",
        timeless=("weight", "bias"),
        packs=True,
        masks=True,
        small={"convolution.triton.short.SEGMENT": 8},
    ),
    "depthwise_convolution": Row(
        "depthwise_convolution",
        partial(short_convolution, activation=None),
        lambda g, rows, tokens: draw(g, x=(rows, tokens, 19), weight=(19, 3), bias=(19,), state=(rows, 19, 2)),
        state="state",
        timeless=("weight", "bias"),
        packs=True,
        masks=True,
    ),
    "gated_convolution": Row(
        "gated_convolution",
        gated_short_convolution,
        lambda g, rows, tokens: draw(g, x=(rows, tokens, 57), weight=(57, 3), bias=(57,)),
        timeless=("weight", "bias"),
        small={"convolution.triton.gated.COLUMNS": 16, "convolution.triton.gated.PROGRAMS": 4},
    ),
    "long_convolution": Row(
        "long_convolution",
        lambda x, taps, **options: long_convolution(x, taps, **options)[0],
        lambda g, rows, tokens: filters(g, rows, tokens, 0),
        timeless=("taps",),
        wide=("taps",),
        masks=True,
        # Their own tests are in convolution/test_triton_filters.py, with the batches that it takes.
        refuses={"triton": "fewer than 16 rows are left to Fourier transforms"},
    ),
    "long_convolution goes on": Row(
        "long_convolution",
        partial(long_convolution, grow=False),
        lambda g, rows, tokens: filters(g, rows, tokens, 8),
        state="history",
        timeless=("taps",),
        wide=("taps",),
        masks=True,
        refuses={"triton": "the kernels have no history"},
    ),
    "diagonal_taps": Row(
        "diagonal_taps",
        lambda backend=None, **t: diagonal_taps(**t, length=70, backend=backend),
        taps,
        wide=("rate", "angle", "gain"),
        flat=True,
    ),
    "pair_products": Row(
        "head_products",
        pair_products,
        lambda g, rows, tokens: draw(g, k=(rows, tokens, 5, 2), v=(rows, tokens, 5, 2)),
        small={"convolution.triton.head_products.BLOCK": 64},
    ),
    "read_pairs": Row(
        "head_products",
        read_pairs,
        lambda g, rows, tokens: draw(g, q=(rows, tokens, 5, 2), y=(rows, tokens, 5, 4)),
        small={"convolution.triton.head_products.BLOCK": 64},
    ),
    "rms_norm": norm_row("rms_norm", norms.rms_norm, "x"),
    "add_rms_norm": norm_row("rms_norm", norms.add_rms_norm, "x", "update"),
    "stream_norm": norm_row("rms_norm", partial(norms.add_rms_norm, update=None), "x"),
    **{
        f"{name} {kind}": norm_row("gated_rms_norm", partial(function, kind=kind), "x", "gate", *more)
        for kind in ("silu", "sigmoid", "silu_before")
        for name, function, more in (
            ("gated_rms_norm", norms.gated_rms_norm, ()),
            ("gated_norm_projection", norms.gated_norm_projection, ("matrix",)),
        )
    },
    "silu_product": Row(
        "silu_product",
        norms.silu_product,
        lambda g, rows, tokens: draw(g, gate=(rows, tokens, 50), up=(rows, tokens, 50)),
    ),
    "gated_projection": Row(
        "silu_product",
        norms.gated_projection,
        lambda g, rows, tokens: draw(g, gate=(rows, tokens, 50), up=(rows, tokens, 50), weight=(4, 50)),
        timeless=("weight",),
    ),
    "delta_gates": Row(
        "delta_gates",
        partial(delta_gates, factor=2.0),
        lambda g, rows, tokens: draw(g, decay=(rows, tokens, 3), write=(rows, tokens, 3), log_rate=(3,), bias=(3,)),
        timeless=("log_rate", "bias"),
        small={"delta_rule.triton.gates.TILE": 32},
    ),
    "mix_with_previous": Row(
        "mix_with_previous",
        mix_with_previous,
        lambda g, rows, tokens: draw(g, x=(rows, tokens, 70), shares=(4, 70)),
        timeless=("shares",),
        small={"time_mixing.triton.token_shift.PROGRAMS": 2},
    ),
    "gated_group_norm": Row(
        "gated_group_norm",
        lambda x, backend=None, **t: gated_group_norm(x, **t, eps=1e-3, dtype=x.dtype, backend=backend),
        lambda g, rows, tokens: draw(g, x=(rows, tokens, 3, 24), gate=(rows, tokens, 72), weight=(72,), bias=(72,)),
        timeless=("weight", "bias"),
    ),
    "stepped_values": Row(
        "stepped_values",
        summed,
        lambda g, rows, tokens: (
            draw(g, values=(rows, tokens, 3, 10), skip=(3,)) | {"step": torch.rand(rows, tokens, 3, generator=g)}
        ),
        timeless=("skip",),
        wide=("step", "skip"),
    ),
    "add_bonus": Row(
        "add_bonus",
        add_bonus,
        added_bonus,
        timeless=("first", "bonus"),
        wide=("reads", "first", "bonus", "r", "k", "v"),  # layers call it in float32
    ),
    "column_sums": Row(
        "column_sums",
        column_sums,
        lambda g, rows, tokens: {"x": 1 + torch.randn(rows * tokens, 70, generator=g)},
        differentiable=False,
        flat=True,
    ),
    "look_up": Row(
        "look_up",
        look_up,
        table_and_ids,
        timeless=("table",),
        small={f"projections.triton.embedding.{name}": n for name, n in (("ROWS", 8), ("COLUMNS", 4), ("FEWEST", 0))},
    ),
    "selected_attention": Row("selected_attention", partial(selected_attention, chunk=3), attention, tolerance=LOOSEST),
    "best_chunks": Row("best_chunks", partial(best_chunks, count=2), choice, differentiable=False),
}

OF_THEIR_OWN = {"expanded_delta_rule", "linear_cross_entropy", "recurrent_step"}
"""Those that take the projections of a layer, or one token in place, or return a number alone:
delta_rule/test_triton_expanded.py, decoding/, cross_entropy/."""


def module_and_name(constant: str) -> tuple[Any, str]:
    """Where a constant of `Row.small` is."""
    module, _, name = constant.rpartition(".")
    return importlib.import_module(f"longrecall.ops.{module}"), name
