"""The recurrences of linear-recurrent language models: tensors in, tensors out."""

from longrecall.ops.convolution.diagonal import diagonal_ssm
from longrecall.ops.convolution.long import long_convolution
from longrecall.ops.convolution.short import short_convolution
from longrecall.ops.dispatch import (
    BACKENDS,
    gated_delta_rule,
    gated_linear_attention,
    generalised_delta_rule,
    merged_linear_attention,
)
from longrecall.ops.linear_attention.bonus import bonus_linear_attention
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
    "long_convolution",
    "merged_linear_attention",
    "selected_attention",
    "selective_scan",
    "short_convolution",
]
