"""The recurrences of linear-recurrent language models: tensors in, tensors out."""

from longrecall.ops.convolution import short_convolution
from longrecall.ops.dispatch import BACKENDS, gated_delta_rule, gated_linear_attention, merged_linear_attention

__all__ = ["BACKENDS", "gated_delta_rule", "gated_linear_attention", "merged_linear_attention", "short_convolution"]
