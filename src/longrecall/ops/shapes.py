"""Checks and reshapes shared by every backend."""

from __future__ import annotations

import torch
from torch import Tensor


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, T, G, ...]`` -> ``[B, T, H, ...]``: head h reads group h // (H / G), as in grouped-query attention."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 when any input is float64, else float32: the dtype of states, decays and products."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def check_attention_inputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None = None
) -> None:
    """Raise ValueError with both shapes named when the inputs of an op do not fit together."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must be [B, T, H, width]; got {_shapes(q=q, k=k, v=v)}")
    if q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"q and k must agree, and share B and T with v; got {_shapes(q=q, k=k, v=v)}")
    groups, heads = q.shape[2], v.shape[2]
    if groups == 0 or heads % groups:
        raise ValueError(f"the {groups} key heads must divide the {heads} value heads; got {_shapes(q=q, v=v)}")
    if log_decay is not None:
        per_head, per_channel = (*v.shape[:2], heads), tuple(q.shape)
        if tuple(log_decay.shape) not in (per_head, per_channel):
            raise ValueError(f"log_decay must be {list(per_head)} or {list(per_channel)}; got {list(log_decay.shape)}")
    if beta is not None and tuple(beta.shape) != (*v.shape[:2], heads):
        raise ValueError(f"beta must be {[*v.shape[:2], heads]}; got {list(beta.shape)}")


def prepare_state(state: Tensor | None, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """The initial state in the accumulation dtype; zeros when None. Raises ValueError on a wrong shape."""
    if state is None:
        return torch.zeros(shape, device=like.device, dtype=dtype)
    if tuple(state.shape) != shape:
        raise ValueError(f"initial_state must be {list(shape)}; got {list(state.shape)}")
    return state.to(dtype)


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())


def decay_factors(log_decay: Tensor | None, heads: int) -> Tensor | None:
    """A log decay ``[B, T, H]`` or ``[B, T, G, K]`` -> exp of it as ``[B, T, H, K or 1, 1]``; None for none."""
    if log_decay is None:
        return None
    if log_decay.dim() == 3:
        return log_decay.exp()[..., None, None]
    return repeat_heads(log_decay, heads).exp()[..., None]


def stack_steps(outputs: list[Tensor], v: Tensor) -> Tensor:
    """Outputs ``[B, ...]`` of every step -> ``[B, T, ...]``; as `v` where there is no step."""
    return torch.stack(outputs, dim=1) if outputs else v.new_zeros(v.shape)
