"""Matrix products of float32 numbers that may be computed in bfloat16, where the CPU multiplies it fast.

The operands of a product are rounded to bfloat16 and the CPU adds up in float32. Each product is rounded once more as
it is returned, as a CPU has no other output type. Sums of products, states, decays and inverses stay in float32.

A call is computed in bfloat16 when its queries, keys or values are bfloat16. Every product then contains such a
rounding already. (Layers of a bfloat16 model, or under autocast, pass some of the three on in float32.) In the
accumulation dtype every function here is the plain product, bit for bit. Linear attention uses this; the many small
products of the delta rule became no faster (benchmarks/results/cpu_ops_amd.json).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 products (AVX512-BF16 or AMX); False where torch cannot tell."""
    # Older versions of torch have no public way to ask: there products stay in float32.
    describe = getattr(torch.cpu, "get_capabilities", None)
    found = {} if describe is None else describe()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


CPU_MULTIPLIES_BFLOAT16 = _multiplies_bfloat16()
"""A property of the machine. Emulated bfloat16 products would be slower than float32 ones."""


def product_dtype(q: Tensor, k: Tensor, v: Tensor, accumulation: torch.dtype) -> torch.dtype:
    """The dtype in which a call with these inputs multiplies: bfloat16, or the accumulation dtype."""
    low = accumulation == torch.float32 and torch.bfloat16 in (q.dtype, k.dtype, v.dtype)
    return torch.bfloat16 if low and v.device.type == "cpu" and CPU_MULTIPLIES_BFLOAT16 else accumulation


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, multiplied in `dtype`, in the dtype in which sums are kept: float32 for bfloat16, else `dtype`."""
    if dtype != torch.bfloat16:
        return a @ b
    return (a.to(dtype) @ b.to(dtype)).float()


def einsum_product(equation: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """As `product`, for a product that is written as an einsum."""
    if dtype != torch.bfloat16:
        return torch.einsum(equation, a, b)
    return torch.einsum(equation, a.to(dtype), b.to(dtype)).float()
