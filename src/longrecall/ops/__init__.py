"""The recurrences of linear-recurrent language models: tensors in, tensors out."""

# Every file that declares an op or a kernel for Hopper is imported here: the registry in ops/backends.py is complete.
import longrecall.ops.convolution.head_products
import longrecall.ops.decoding.op
import longrecall.ops.delta_rule.expanded
import longrecall.ops.delta_rule.gates
import longrecall.ops.delta_rule.hopper_kernels
import longrecall.ops.delta_rule.subheads
import longrecall.ops.expansion.hopper_kernels
import longrecall.ops.linear_attention.stepped_values
import longrecall.ops.norms.op
import longrecall.ops.projections.biased
import longrecall.ops.projections.embedding
import longrecall.ops.time_mixing.op  # noqa: F401
from longrecall.ops.backends import BACKENDS
from longrecall.ops.convolution.diagonal import diagonal_ssm
from longrecall.ops.convolution.long import long_convolution
from longrecall.ops.convolution.short import short_convolution
from longrecall.ops.delta_rule.op import gated_delta_rule, generalised_delta_rule
from longrecall.ops.linear_attention.bonus import bonus_linear_attention
from longrecall.ops.linear_attention.op import gated_linear_attention, merged_linear_attention
from longrecall.ops.linear_recurrence.op import linear_recurrence, weighted_average
from longrecall.ops.retrieval.op import best_chunks, selected_attention
from longrecall.ops.scan.op import selective_scan

__all__ = [
    "BACKENDS",
    "best_chunks",
    "bonus_linear_attention",
    "diagonal_ssm",
    "gated_delta_rule",
    "gated_linear_attention",
    "generalised_delta_rule",
    "linear_recurrence",
    "long_convolution",
    "merged_linear_attention",
    "selected_attention",
    "selective_scan",
    "short_convolution",
    "weighted_average",
]
