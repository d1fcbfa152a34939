"""Products of all pairs of channels of a head, and reading such pairs, as H3 does before and after its recurrence.

Heads are small (2 channels or so), which makes broadcasting and sums over so few numbers slow in plain torch; on a GPU
kernels do both in one pass over memory (triton/head_products.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.backends import Op, declare, kernel

HEAD_PRODUCTS = declare(Op("head_products", kernels="convolution.triton.head_products", compiler_fuses=True))

_pair_products_kernel = kernel("convolution.triton.head_products", "pair_products")
_read_pairs_kernel = kernel("convolution.triton.head_products", "read_pairs")


def pair_products(k: Tensor, v: Tensor, *, backend: str | None = None) -> Tensor:
    """k, v ``[..., H, P]`` -> ``[..., H, P * P]``: k_i v_j at place i * P + j.

    Args:
        k, v: of one shape and dtype.
        backend: "triton" or "reference"; None chooses.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    if HEAD_PRODUCTS.on_kernels({"k": k, "v": v}, backend):
        pairs: Tensor = _pair_products_kernel(k, v)
        return pairs
    return (k[..., :, None] * v[..., None, :]).flatten(-2)


def read_pairs(q: Tensor, y: Tensor, *, backend: str | None = None) -> Tensor:
    """q ``[..., H, P]``, y ``[..., H, P * P]`` -> ``[..., H, P]``: sum over i of q_i y_ij; `backend` as above."""
    if HEAD_PRODUCTS.on_kernels({"k": q, "v": y}, backend):
        out: Tensor = _read_pairs_kernel(q, y)
        return out
    pairs = y.unflatten(-1, (q.shape[-1], q.shape[-1]))
    return torch.sum(q[..., None] * pairs, -2)
