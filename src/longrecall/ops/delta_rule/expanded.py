"""The delta rule of a whole layer: expansion, short convolutions, norms and the rule, only in kernels.

Its definition is the plain path of the layer that calls it (layers/mixers/delta_net.py).
"""

from __future__ import annotations

from longrecall.ops.backends import CHUNKED, REFERENCE, Op, declare, kernel, never_slow

EXPANDED_DELTA_RULE = declare(
    Op(
        "expanded_delta_rule",
        kernels="delta_rule.triton.expanded",
        plain=(REFERENCE, CHUNKED),
        slow=never_slow,
        covers=("short_convolution", "depthwise_convolution", "subhead_delta_rule", "gated_delta_rule"),
    )
)

expanded_delta_rule = kernel("delta_rule.triton.expanded", "expanded_delta_rule")
"""`delta_rule.triton.expanded.expanded_delta_rule`, for calls whose choice by `EXPANDED_DELTA_RULE` is the kernels."""
