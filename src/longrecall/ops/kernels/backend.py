"""The Triton kernels as dispatch sees them: whether they can serve a call, why not, and how to run it.

Triton is imported when an op is first asked for, not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from longrecall.installing import install_command

MODULES = {
    "gated_linear_attention": "linear_attention.triton.chunked",
    "merged_linear_attention": "linear_attention.triton.chunked",
    "gated_delta_rule": "delta_rule.triton.chunked",
    "subhead_delta_rule": "delta_rule.triton.chunked",
    "expanded_delta_rule": "delta_rule.triton.expanded",
    "selected_attention": "retrieval.triton.retrieval",
    "best_chunks": "retrieval.triton.retrieval",
    "selective_scan": "scan.triton.selective_scan",
    "rms_norm": "norms.triton.rms_norm",
    "gated_rms_norm": "norms.triton.rms_norm",
    "silu_product": "norms.triton.gated",
    "delta_gates": "delta_rule.triton.gates",
    "short_convolution": "convolution.triton.short",
    "depthwise_convolution": "convolution.triton.depthwise",
    "long_convolution": "convolution.triton.long",
    "diagonal_taps": "convolution.triton.diagonal",
    "head_products": "convolution.triton.head_products",
    "mix_with_previous": "time_mixing.triton.token_shift",
    "gated_group_norm": "time_mixing.triton.group_norm",
    "look_up": "projections.triton.embedding",
    "column_sums": "projections.triton.column_sums",
    "add_bonus": "linear_attention.triton.bonus",
    "gated_convolution": "convolution.triton.gated",
    "stepped_values": "linear_attention.triton.stepped_values",
}
"""Ops that have kernels, and the module of each."""

OLDEST_CAPABILITY = (8, 0)
"""bfloat16 and tf32 products: Ampere and later."""


_INSTALLED = importlib.util.find_spec("triton") is not None
"""Looked up once, and not in a function that remembers it: torch.compile would look into that, and warn."""
_NOT_INSTALLED = f"Triton is not installed; {install_command('triton')}"


def unavailable() -> str | None:
    """Why no kernel can run on this machine, in words; None = they can. TRITON_INTERPRET=1 needs no GPU."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU has compute capability {major}.{minor}; 8.0 or later is needed"
    return None


def without_gluon() -> str | None:
    """Why the kernels in Gluon for Hopper, which stand in for some of these, cannot run here; None = they can."""
    if reason := unavailable():
        return reason
    why: str | None = importlib.import_module("longrecall.ops.kernels.hopper").unavailable()
    return why


def declines(op: str, inputs: dict[str, Tensor | None], **options: Any) -> str | None:
    """Why a call cannot be served, in words; None = it can. `inputs` by name, in the dtypes the caller gave."""
    if op not in MODULES:
        return f"{op} has no kernel"
    reason = unavailable()
    if reason:
        return reason
    if any(x is not None and x.dtype == torch.float64 for x in inputs.values()):
        return "float64 is left to the other backends"
    reason = _module(op).declines(**inputs, **options)
    return None if reason is None else str(reason)


@torch.compiler.disable
def gated_linear_attention(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`linear_attention.gated_linear_attention`."""
    return _run("gated_linear_attention", inputs)


@torch.compiler.disable
def merged_linear_attention(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`linear_attention.merged_linear_attention`."""
    return _run("merged_linear_attention", inputs)


@torch.compiler.disable
def gated_delta_rule(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`delta_rule.gated_delta_rule`."""
    return _run("gated_delta_rule", inputs)


@torch.compiler.disable
def subhead_delta_rule(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`delta_rule.subhead_delta_rule`."""
    return _run("subhead_delta_rule", inputs)


@torch.compiler.disable
def expanded_delta_rule(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`expanded.expanded_delta_rule`."""
    o, final = _module("expanded_delta_rule").expanded_delta_rule(**inputs)
    return o, final


@torch.compiler.disable
def selective_scan(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`selective_scan.selective_scan`."""
    y, final = _module("selective_scan").selective_scan(**inputs)
    return y, final


@torch.compiler.disable
def add_rms_norm(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`normalisation.add_rms_norm`."""
    stream, out = _module("rms_norm").add_rms_norm(*inputs)
    return stream, out


@torch.compiler.disable
def gated_rms_norm(*inputs: Any) -> Tensor:
    """`gating.gated_rms_norm`."""
    out: Tensor = _module("silu_product").gated_rms_norm(*inputs)
    return out


@torch.compiler.disable
def gated_norm_projection(*inputs: Any) -> Tensor:
    """`gating.gated_norm_projection`."""
    out: Tensor = _module("silu_product").gated_norm_projection(*inputs)
    return out


@torch.compiler.disable
def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """`gating.silu_product`."""
    out: Tensor = _module("silu_product").silu_product(gate, up)
    return out


@torch.compiler.disable
def gated_projection(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`gating.gated_projection`."""
    out: Tensor = _module("silu_product").gated_projection(gate, up, weight)
    return out


@torch.compiler.disable
def delta_gates(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`gates.delta_gates`."""
    log_decay, beta = _module("delta_gates").delta_gates(*inputs)
    return log_decay, beta


@torch.compiler.disable
def short_convolution(*inputs: Any) -> Tensor:
    """`convolution.short_convolution`."""
    out: Tensor = _module("short_convolution").short_convolution(*inputs)
    return out


@torch.compiler.disable
def depthwise_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`depthwise.convolve`."""
    out: Tensor = _module("depthwise_convolution").convolve(x, weight, bias)
    return out


@torch.compiler.disable
def long_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """`long_convolution.convolve`."""
    out: Tensor = _module("long_convolution").convolve(x, taps)
    return out


@torch.compiler.disable
def diagonal_taps(*inputs: Any) -> Tensor:
    """`diagonal.taps`."""
    out: Tensor = _module("diagonal_taps").taps(*inputs)
    return out


@torch.compiler.disable
def pair_products(k: Tensor, v: Tensor) -> Tensor:
    """`head_products.pair_products`."""
    out: Tensor = _module("head_products").pair_products(k, v)
    return out


@torch.compiler.disable
def read_pairs(q: Tensor, y: Tensor) -> Tensor:
    """`head_products.read_pairs`."""
    out: Tensor = _module("head_products").read_pairs(q, y)
    return out


@torch.compiler.disable
def mix_with_previous(x: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
    """`token_shift.mix_with_previous`."""
    return tuple(_module("mix_with_previous").mix_with_previous(x, shares))


@torch.compiler.disable
def gated_group_norm(*inputs: Any) -> Tensor:
    """`group_norm.gated_group_norm`."""
    out: Tensor = _module("gated_group_norm").gated_group_norm(*inputs)
    return out


@torch.compiler.disable
def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """`embedding.look_up`."""
    out: Tensor = _module("look_up").look_up(ids, table)
    return out


@torch.compiler.disable
def column_sums(x: Tensor) -> Tensor:
    """`column_sums.column_sums`."""
    out: Tensor = _module("column_sums").column_sums(x)
    return out


@torch.compiler.disable
def add_bonus(*inputs: Tensor) -> Tensor:
    """`bonus.add_bonus`."""
    out: Tensor = _module("add_bonus").add_bonus(*inputs)
    return out


@torch.compiler.disable
def gated_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`gated_convolution.convolve`."""
    passed, product = _module("gated_convolution").convolve(x, weight, bias)
    return passed, product


@torch.compiler.disable
def stepped_values(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`state_space.stepped_values`."""
    y, final = _module("stepped_values").stepped_values(*inputs)
    return y, final


@torch.compiler.disable
def selected_attention(*inputs: Any) -> Tensor:
    """`retrieval.selected_attention`."""
    out: Tensor = _module("selected_attention").selected_attention(*inputs)
    return out


@torch.compiler.disable
def best_chunks(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`retrieval.best_chunks`."""
    chunks, scores = _module("best_chunks").best_chunks(*inputs)
    return chunks, scores


def _run(op: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    v: Tensor = inputs["v"]
    # A launch goes to the current device, which need not be that of the tensors.
    with torch.cuda.device(v.device if v.is_cuda else -1):
        out, final = getattr(_module(op), op)(**inputs)
    return out, final


def _module(op: str) -> Any:
    return importlib.import_module(f"longrecall.ops.{MODULES[op]}")
