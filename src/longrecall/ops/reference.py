"""The definition of every recurrence, one step at a time, in the dtype it is given.

Every faster backend is tested against these loops. They are differentiable and need T steps. Each is written down in
the folder of its family.
"""

from longrecall.ops.delta_rule.reference import gated_delta_rule, generalised_delta_rule
from longrecall.ops.linear_attention.reference import (
    bonus_linear_attention,
    gated_linear_attention,
    merged_linear_attention,
)
from longrecall.ops.linear_recurrence.reference import linear_recurrence, weighted_average
from longrecall.ops.retrieval.reference import selected_attention
from longrecall.ops.scan.reference import selective_scan

__all__ = [
    "bonus_linear_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "generalised_delta_rule",
    "linear_recurrence",
    "merged_linear_attention",
    "selected_attention",
    "selective_scan",
    "weighted_average",
]
