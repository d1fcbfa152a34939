"""The delta rule of a whole layer: expansion, short convolutions, norms and the rule, only in kernels.

Its definition is the plain path of the layer that calls it (layers/mixers/delta_net.py).
"""

from __future__ import annotations

from typing import Any

from longrecall.ops.backends import CHUNKED, REFERENCE, Op, Presumed, declare, kernel, never_slow

EXPANDED_DELTA_RULE = declare(
    Op(
        "expanded_delta_rule",
        kernels="delta_rule.triton.expanded",
        plain=(REFERENCE, CHUNKED),
        slow=never_slow,
        covers=("short_convolution", "depthwise_convolution", "subhead_delta_rule", "gated_delta_rule"),
    )
)


def _presumed(queries: Any, keys: Any, values: Any, **how: Any) -> Presumed:
    for name, heads in (("queries", queries), ("keys", keys), ("values", values)):
        (count, width), weight, made = heads.projected.shape[2:], heads.weight, heads.projected.shape[3]
        if weight is not None:
            yield f"the expansion of {name}", weight, count * width * weight.shape[-1]
            # Grafted, the heads themselves are the first part of what the convolution reads.
            made = weight.shape[-1] + (width if how["grafted"] else 0)
        yield f"the taps of {name}", heads.taps, count * made * heads.taps.shape[-1]


expanded_delta_rule = kernel("delta_rule.triton.expanded", "expanded_delta_rule", presumes=_presumed)
"""`delta_rule.triton.expanded.expanded_delta_rule`, for calls whose choice by `EXPANDED_DELTA_RULE` is the kernels."""
