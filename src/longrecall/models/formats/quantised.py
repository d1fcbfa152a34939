"""Quantised weights: how they are recognised, and the way out that the error names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longrecall.errors import UserError

_SUFFIXES = {
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8",
    ".input_scale": "fp8",
    ".weight_scale_2": "nvfp4",
    ".weight_packed": "compressed-tensors",
    ".weight_shape": "compressed-tensors",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    "_blocks": "mxfp4",
    "_scales": "mxfp4",
}
"""How the names of tensors end that only quantised checkpoints have."""

_DEQUANTIZED = {
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}
WAY_OUT = "take the model's checkpoint in bfloat16 or float16"


def refuse_quantised(raw: dict[str, Any], where: str) -> None:
    """Raise UserError when a parsed config.json says that the weights are quantised; `where` names it."""
    for path, section in (("", raw), ("text_config.", raw.get("text_config"))):
        for key in ("quantization_config", "compression_config"):
            found = section.get(key) if isinstance(section, dict) else None
            if not found:
                continue
            method = found.get("quant_method") if isinstance(found, dict) else None
            raise UserError(_message(f'{where}: "{path}{key}" says', method if isinstance(method, str) else None))


def quantised_by_name(names: Iterable[str]) -> str | None:
    """Return how the checkpoint with tensors of these names is quantised; None where no name tells of that."""
    for name in names:
        for suffix, method in _SUFFIXES.items():
            if name.endswith(suffix):
                return method
    return None


def quantised_tensor(place: str, name: str, method: str) -> UserError:
    """Return the error for a checkpoint in which the tensor `name` shows that it is quantised."""
    return UserError(_message(f'{place}: tensor "{name}" shows', method))


def _message(start: str, method: str | None) -> str:
    load = "AutoModelForCausalLM.from_pretrained"
    if method in _DEQUANTIZED:
        made = f"make one with transformers: {load}(..., quantization_config={_DEQUANTIZED[method]})"
    elif method == "torchao":
        made = f"open it with transformers: {load}(...); a whole checkpoint is quantised as it is loaded (--quantize)"
    elif method is not None and method.startswith("bitsandbytes"):
        made = f"make one with transformers: {load}(...).dequantize()"
    else:
        made = "dequantise it with the tool that made it"
    kind = f" ({method})" if method else ""
    return (
        f"{start} that the weights are quantised{kind}; longrecall reads 16- and 32-bit weights: {WAY_OUT}, or {made}"
    )
