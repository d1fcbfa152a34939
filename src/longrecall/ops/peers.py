"""Kernels of other packages as backends: flash-linear-attention ("fla") and FlashQLA ("flash_qla").

Neither package is needed, and nothing of it is imported before a call names it. Only then is it used. It must fulfil
the contract of the op exactly; `why_not` says why it cannot. Padding and packed documents never reach it: layers zero
what padded tokens write, and every document gets a row of its own before a backend is called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrecall.ops.execution import cuda_homes, fla_leaves_tilelang_out
from longrecall.ops.linear_attention.chunked import STRONGEST_DECAY
from longrecall.ops.shapes import repeat_heads

DTYPES = (torch.bfloat16,)
"""The only dtype: in float32 the packages multiply in tf32, in float16 their states overflow."""

LEAST_WIDTH = 64
"""Channels of a head. Tiles of fewer are multiplied wrongly by Triton 3.6 on Hopper (ops/kernels/launch.py)."""


@dataclass(frozen=True)
class Peer:
    """A package whose kernels are called, and what it needs."""

    title: str
    distributions: tuple[str, ...]
    """Names under which it may be installed."""
    oldest: tuple[int, ...]
    """The version whose arguments and results were read; older ones differ."""
    functions: dict[tuple[str, str], tuple[str, str]]
    """(op, kind of decay) -> module and function."""
    shares_keys: frozenset[str]
    """Functions whose value heads may share key heads. For the others key heads are repeated."""
    widest: dict[str, int]
    """Most key channels, by function."""


PEERS = {
    "fla": Peer(
        "flash-linear-attention",
        ("fla-core", "flash-linear-attention"),
        (0, 6),
        {
            ("gated_linear_attention", "none"): ("fla.ops.simple_gla", "chunk_simple_gla"),
            ("gated_linear_attention", "head"): ("fla.ops.simple_gla", "chunk_simple_gla"),
            ("gated_linear_attention", "channel"): ("fla.ops.gla", "chunk_gla"),
            ("gated_delta_rule", "none"): ("fla.ops.delta_rule", "chunk_delta_rule"),
            ("gated_delta_rule", "head"): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
            ("gated_delta_rule", "channel"): ("fla.ops.kda", "chunk_kda"),
        },
        frozenset({"chunk_gated_delta_rule", "chunk_kda"}),
        # chunk_gla tunes itself for minutes at wider heads; the delta rules refuse them.
        {"chunk_simple_gla": 512, "chunk_gla": 512, "chunk_delta_rule": 256}
        | dict.fromkeys(("chunk_gated_delta_rule", "chunk_kda"), 256),
    ),
    "flash_qla": Peer(
        "FlashQLA",
        ("flash-qla",),
        (0, 1, 3),
        {
            ("gated_delta_rule", "none"): ("flash_qla", "chunk_gated_delta_rule"),
            ("gated_delta_rule", "head"): ("flash_qla", "chunk_gated_delta_rule"),
        },
        frozenset({"chunk_gated_delta_rule"}),
        {"chunk_gated_delta_rule": 128},
    ),
}


def why_not_here(name: str) -> str | None:
    """Why this peer can serve nothing on this machine, in words; None = it can, as far as is known before an import."""
    peer = PEERS[name]
    found = next((v for v in map(_version, peer.distributions) if v is not None), None)
    if found is None:
        return f"{peer.title} is not installed; pip install {peer.distributions[-1]}"
    if _numbers(found) < peer.oldest:
        return f"{peer.title} {found} is too old; {'.'.join(map(str, peer.oldest))} or later is needed"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    shown = ".".join(map(str, capability))
    if name == "fla":
        return None if capability >= (8, 0) else f"the GPU has compute capability {shown}; 8.0 or later is needed"
    if capability not in ((9, 0), (10, 0), (10, 3)):
        return f"FlashQLA knows GPUs of compute capability 9.0, 10.0 and 10.3, not {shown}"
    return _without_tilelang()


def why_not(name: str, op: str, inputs: Mapping[str, Tensor | None]) -> str | None:
    """Why a peer cannot serve a call with our contract, in words; None = it can. `inputs` by name, as the caller's."""
    peer = PEERS[name]
    if not any(op == known for known, _ in peer.functions):
        return f"{peer.title} has no {op}"
    reason = why_not_here(name)
    if reason:
        return reason
    decay = _decay(inputs)
    if (op, decay) not in peer.functions:
        return f"{peer.title} has no {op} with a decay per {decay}"
    module, function = peer.functions[op, decay]
    q, v = inputs["q"], inputs["v"]
    assert q is not None and v is not None
    if not _on_gpu(v):
        return f"the tensors must be on a CUDA device, not on {v.device.type}"
    reason = _wrong_numbers(name, op, inputs) or _wrong_widths(peer, function, q.shape[3], v.shape[3])
    if reason:
        return reason
    if name == "flash_qla" and v.shape[0] == 1 and _capturing():
        return "FlashQLA reads lengths back for a single row, which no CUDA graph can record"
    if name == "fla" and decay == "head" and _needs_gradients(inputs):
        reason = _wrong_gradients(function)
    return reason or _loaded(module, function)[1]


def run(name: str, op: str, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The contract of the op in ops/reference.py, `scale` and `state` included, by the kernels of this peer.

    Queries and keys are rounded to the dtype of v; decays, betas and states are float32. Decays below e^-30 a token
    count as that, as in all our chunked code: a sum of larger ones would hide the others.
    """
    out, final = _untraced_run(name, op, inputs)
    return out, final


def _run(name: str, op: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    v: Tensor = inputs["v"]
    peer, decay = PEERS[name], _decay(inputs)
    module, function = peer.functions[op, decay]
    work, reason = _loaded(module, function)
    if work is None:
        raise RuntimeError(reason)
    heads = v.shape[2]
    q, k = inputs["q"].to(v.dtype), inputs["k"].to(v.dtype)
    if function not in peer.shares_keys:
        q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    given = {"q": q, "k": k, "v": v, "g": _log_decay(name, inputs["log_decay"], v)}
    if function == "chunk_delta_rule":
        del given["g"]
    if "beta" in inputs:
        given["beta"] = inputs["beta"].float()
    # Kernels are launched on the current device, which need not be that of the tensors.
    with torch.cuda.device(v.device if v.is_cuda else -1):
        out, final = work(**given, scale=inputs["scale"], initial_state=inputs["state"], output_final_state=True)
    return out, final.float()


_untraced_run: Any = torch.compiler.disable(_run)


def _decay(inputs: Mapping[str, Any]) -> str:
    log_decay = inputs.get("log_decay")
    return "none" if log_decay is None else "head" if log_decay.dim() == 3 else "channel"


def _log_decay(name: str, log_decay: Tensor | None, v: Tensor) -> Tensor | None:
    if log_decay is None:
        # FlashQLA has no call without a decay; a decay of zeros gives the same result.
        shape, zeros = v.shape[:3], name == "flash_qla"
        return torch.zeros(shape, device=v.device, dtype=torch.float32) if zeros else None
    decay = log_decay.float().clamp(min=STRONGEST_DECAY[torch.float32])
    return repeat_heads(decay, v.shape[2])


def _wrong_numbers(name: str, op: str, inputs: Mapping[str, Tensor | None]) -> str | None:
    v = inputs["v"]
    assert v is not None
    if v.dtype not in DTYPES:
        return f"values must be bfloat16, not {str(v.dtype).removeprefix('torch.')}"
    if any(x is not None and x.dtype == torch.float64 for x in inputs.values()):
        return "float64 is left to the other backends"
    for key in ("q", "k") if op == "gated_linear_attention" else ():
        x = inputs[key]
        if x is not None and x.dtype != v.dtype:
            # The delta rule rounds them to the dtype of v; linear attention promises products in that of q.
            return f"q, k and v must have one dtype; {key} has {str(x.dtype).removeprefix('torch.')}"
    return None


def _wrong_widths(peer: Peer, function: str, key_width: int, value_width: int) -> str | None:
    if peer.title == "FlashQLA":
        fits = key_width == value_width == 128
        return None if fits else f"keys and values must be 128 wide, not {key_width} and {value_width}"
    for what, width, most in (("key", key_width, peer.widest[function]), ("value", value_width, 512)):
        if not LEAST_WIDTH <= width <= most:
            return f"{function} is called for {what} widths of {LEAST_WIDTH} to {most}, not {width}"
    return None


def _wrong_gradients(function: str) -> str | None:
    """fla refuses gradients under a decay per head where Triton miscompiles them; tilelang has another kernel."""
    triton = _version("triton") or _version("pytorch-triton")
    if torch.cuda.get_device_capability()[0] != 9 or triton is None or not (3, 4) <= _numbers(triton) < (3, 7, 1):
        return None
    broken = f"Triton {triton} computes the gradients of {function} wrongly on Hopper"
    if function == "chunk_simple_gla":
        return f"{broken}; 3.7.1 is needed"
    missing = _without_tilelang()
    if missing is None and fla_leaves_tilelang_out():
        missing = "FLA_TILELANG is 0"
    return None if missing is None else f"{broken} and {missing}"


def _without_tilelang() -> str | None:
    if _version("tilelang") is None:
        return "tilelang is not installed; pip install tilelang"
    return None if _has_nvcc() else "tilelang compiles with nvcc, which is neither on PATH nor in CUDA_HOME"


@functools.cache
def _has_nvcc() -> bool:
    return shutil.which("nvcc") is not None or any((Path(home) / "bin" / "nvcc").exists() for home in cuda_homes())


def _needs_gradients(inputs: Mapping[str, Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.values())


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release in a version: "0.6.0rc1" -> (0, 6, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


@functools.cache
def _loaded(module: str, function: str) -> tuple[Callable[..., Any] | None, str | None]:
    """The function, or why it cannot be imported. A package that does not fit the machine may raise any error."""
    try:
        return getattr(importlib.import_module(module), function), None
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"{module}.{function} cannot be imported: {type(error).__name__}: {first}"
