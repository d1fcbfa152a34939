"""Sizes of a call of the gated delta rule's kernels, and the shapes of their programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longrecall.ops.delta_rule.triton.forward import CHUNK
from longrecall.ops.kernels.launch import arithmetic, interpreting

WORKSPACE = 11 * 2**28
"""Bytes of workspace that the backward may use, unless a single row of the batch needs more."""

SIZE = int(CHUNK.value)


@dataclass(frozen=True)
class Plan:
    """Sizes of one call and what its kernels are compiled for."""

    rows: int
    length: int
    key_heads: int
    heads: int
    value_heads: int
    subheads: int
    key_width: int
    value_width: int
    mode: str
    """How products are computed; see `dot` in forward.py."""
    scale: float

    @property
    def chunks(self) -> int:
        return -(-self.length // SIZE)

    @property
    def kept(self) -> torch.dtype:
        """Dtype in which a kernel stores the operands of a later kernel's products."""
        return torch.bfloat16 if self.mode.startswith("bf16") else torch.float32

    @property
    def value_block(self) -> int:
        """Value channels of a program's state: on a GPU at least 128 bytes of them."""
        return min(self.value_width, 64 if self.kept == torch.bfloat16 or self.key_width <= 64 else 32)

    @property
    def key_tile(self) -> int:
        """Key channels of a program of `keys_kernel`: five sums of so many columns fill the registers of four warps."""
        return min(self.key_width, 64 if self.kept == torch.bfloat16 else 32)

    @property
    def value_tile(self) -> int:
        """Value channels over which a program of `keys_kernel` sums at a time."""
        return min(self.value_width, 64 if self.kept == torch.bfloat16 else 32)

    @property
    def tile_stages(self) -> int:
        """How many such tiles are loaded at a time."""
        return 2 if self.kept == torch.bfloat16 else 1

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Shape of the states."""
        return self.rows, self.heads, self.key_width, self.value_width

    @property
    def widths(self) -> dict[str, int]:
        """Key and value channels of a state."""
        return {"keys": self.key_width, "values": self.value_width}

    @property
    def heads_of(self) -> dict[str, int]:
        return {"KEY_HEADS": self.key_heads, "HEADS": self.heads}

    @property
    def sharing(self) -> dict[str, int]:
        return {"SUBHEADS": self.subheads, "VALUE_HEADS": self.value_heads}

    def walking(self, stages: int = 2) -> dict[str, Any]:
        """Constants of both walks; `stages`: chunks that are loaded at a time, 1 where keys are too wide for more."""
        widths = {"K": self.key_width, "V": self.value_width, "BV": self.value_block, "MODE": self.mode}
        stages = 1 if self.key_width > 128 else stages
        return {**self.heads_of, **self.sharing, **widths, "num_warps": 4, "num_stages": stages}

    def parts(self, processors: int) -> int:
        """How many programs share the subheads of a value head. Each writes a sum of its own.

        In float32 they are as few as keep the GPU busy. In bfloat16 every subhead has a program, whose sum is rounded
        once: for 8 subheads that is half the memory traffic of four programs that add to sums in float32.
        """
        if self.kept == torch.bfloat16:
            return self.subheads
        programs = self.rows * self.value_heads * (self.value_width // self.value_block)
        fits = (n for n in range(1, self.subheads + 1) if self.subheads % n == 0 and n * programs >= 2 * processors)
        return next(fits, self.subheads)

    def group_rows(self, processors: int, more: int = 0) -> int:
        """Rows of the batch that the backward takes at a time; `more`: numbers per row that the caller holds too."""
        tokens = self.heads * self.chunks * SIZE
        numbers = 2 * tokens * self.value_width + 2 * tokens // SIZE * self.key_width * self.value_width + more
        most = WORKSPACE // (numbers * self.kept.itemsize)
        least = 2 * processors // (self.heads * (self.value_width // self.value_block))
        groups = triton.cdiv(self.rows, max(1, most, least))
        return int(triton.cdiv(self.rows, groups))


def plan_of(q: Tensor, v: Tensor, beta: Tensor, scale: float) -> Plan:
    """The plan of a call: q ``[B, T, Hkey, K]``, v ``[B, T, Hv, V]``, beta ``[B, T, H]``."""
    rows, length, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    heads = beta.shape[2]
    sizes = (rows, length, key_heads, heads, value_heads, heads // value_heads, key_width, value_width)
    products = arithmetic(v.dtype)
    narrow = "bf16 wide" if interpreting() else "bf16"
    return Plan(*sizes, mode=narrow if products.dtype == torch.bfloat16 else products.precision, scale=scale)
