"""Sizes of a call of the kernels of gated linear attention, and the shapes of their programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longrecall.ops.kernels.launch import Arithmetic, arithmetic, product_block


@dataclass(frozen=True)
class Plan:
    """Sizes of a call and what its kernels are compiled for."""

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    mode: int
    """0 no decay, 1 per head, 2 per channel."""
    merged: bool
    chunk: int
    numbers: Arithmetic
    constants: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        # One stage for float32: loads for several iterations would not fit, and three products take long to compile.
        stages = 3 if self.numbers.dtype == torch.bfloat16 else 1
        constants = {"C": self.chunk, "num_stages": stages, **self.numbers.constants()}
        object.__setattr__(self, "constants", constants)

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def pairs(self) -> int:
        """States: pairs of a key head and a value head."""
        return self.value_heads * (self.key_heads if self.merged else 1)

    @property
    def many_heads(self) -> bool:
        """Whether states are as narrow as Mamba-2's: a decay per head, one tile of values in bfloat16."""
        return self.mode == 1 and self.numbers.dtype == torch.bfloat16 and self.value_width <= 64

    @property
    def _gla_merged(self) -> bool:
        """Whether states are merged GLA's: a decay per channel, operands in bfloat16."""
        return self.merged and self.mode == 2 and self.numbers.dtype == torch.bfloat16

    @property
    def decays(self) -> int:
        """Numbers of the log decay of one token."""
        if self.mode == 2:
            return self.key_heads * self.key_width
        return self.key_heads if self.merged else self.value_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.batch, self.pairs * self.key_width * self.value_width)

    def segments(self, most: int) -> list[tuple[int, int]]:
        """First chunk and number of chunks of each segment. The states of a segment fit into the given bytes."""
        one = self.state_shape[0] * self.state_shape[1] * self.numbers.dtype.itemsize
        step = max(1, most // one)
        return [(first, min(step, self.chunks - first)) for first in range(0, self.chunks, step)]

    def heads(self) -> tuple[int, ...]:
        """Hk, Hv, R, P, K, V, W: the sizes that most kernels take, in their order."""
        repeats = 1 if self.merged else self.value_heads // self.key_heads
        widths = (self.key_width, self.value_width, self.decays)
        return (self.key_heads, self.value_heads, repeats, self.pairs, *widths)

    @property
    def key_block(self) -> int:
        """Columns of a tile of keys."""
        return product_block(self.key_width, 64, self.numbers.dtype)

    @property
    def wide_key_block(self) -> int:
        """The same for kernels that read a tile of values once for each tile of keys: wide where values are narrow."""
        return product_block(self.key_width, 128 if self.many_heads else 64, self.numbers.dtype)

    def value_block(self, largest: int) -> int:
        """Columns of a tile of values; half as many in float32, to save shared memory."""
        largest = largest if self.numbers.dtype == torch.bfloat16 else 64
        return product_block(self.value_width, largest, self.numbers.dtype)

    def walking(self) -> dict[str, Any]:
        """Constants of the kernels that walk forward from chunk to chunk."""
        # With one stage less a second program fits the multiprocessor, if there are enough programs.
        return self.walking_back() | ({"num_stages": 2} if self._gla_merged else {})

    def walking_back(self) -> dict[str, Any]:
        """Constants of the kernel that walks from the last chunk to the first."""
        return self._tiles(self.wide_key_block, self.value_block(128)) | {"num_warps": 4}

    def reading(self) -> dict[str, Any]:
        """Constants of the kernels that read a chunk's state, one tile of keys after the other."""
        warps = 8 if self.merged and not self._gla_merged else 4
        return self._tiles(self.key_block, self.value_block(128)) | {"num_warps": warps}

    def score_gradients(self) -> dict[str, Any]:
        """Constants of `score_gradients_kernel`."""
        constants = self._tiles(16, self.value_block(64)) | {"WHOLE": self._whole, "num_warps": 4}
        del constants["BK"]
        return constants

    def key_gradients(self) -> dict[str, Any]:
        """Constants of `keys_kernel`. With four warps a row of a tile lies in one warp, so its sums need no barrier."""
        constants = self._tiles(self.key_block, self.value_block(64)) | {"WHOLE": self._whole}
        return constants | {"num_warps": 4 if self.many_heads else 8}

    @property
    def _whole(self) -> bool:
        return self.value_width <= self.value_block(64)

    def _tiles(self, key_block: int, value_block: int) -> dict[str, Any]:
        return {"MODE": self.mode, "MERGED": self.merged, "BK": key_block, "BV": value_block, **self.constants}


def plan_of(q: Tensor, v: Tensor, log_decay: Tensor | None, mixing: Tensor | None, chunk: int) -> Plan:
    """The plan of a call: q ``[B, T, Hk, K]``, v ``[B, T, Hv, V]``, chunks of so many tokens."""
    mode = 0 if log_decay is None else log_decay.dim() - 2
    batch, length, key_heads, width = q.shape
    sizes = (batch, length, key_heads, v.shape[2], width, v.shape[3])
    return Plan(*sizes, mode=mode, merged=mixing is not None, chunk=chunk, numbers=arithmetic(q.dtype))
