"""The recurrences of linear-recurrent language models: tensors in, tensors out."""

from longrecall.ops.bonus_attention import bonus_linear_attention
from longrecall.ops.convolution import short_convolution
from longrecall.ops.diagonal import diagonal_ssm
from longrecall.ops.dispatch import (
    BACKENDS,
    gated_delta_rule,
    gated_linear_attention,
    generalised_delta_rule,
    merged_linear_attention,
)
from longrecall.ops.long_convolution import long_convolution
from longrecall.ops.retrieval import best_chunks, selected_attention
from longrecall.ops.selective_scan import selective_scan

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
