"""One token of softmax attention on a cache with room, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.layers.rotary import apply_rotary
from longrecall.ops.decoding.triton.attention import Cache, attend
from longrecall.ops.kernels import launch

pytestmark = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu_attention_decoding.py"
)

THETA = 100.0
Inputs = tuple[Tensor, Tensor, Tensor, Cache, Tensor, Tensor, tuple[Tensor, Tensor] | None]


def inputs_of(
    heads: tuple[int, int], width: int, room: int, read: int, meta: int, dtype: torch.dtype, device: str
) -> Inputs:
    """Two rows whose cache holds the tokens before position `read`; the other one's first three are padding.

    What no token lies in is NaN, as in memory that was never written.
    """
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device, dtype)

    (queries, groups), columns = heads, torch.arange(room)
    filled = min(read, room)
    # Round and round: a column holds the newest position that falls into it.
    places = torch.where(columns < filled, read - 1 - (read - 1 - columns) % room, -1).repeat(2, 1)
    places[1] -= 3
    places[places < 0] = -1
    key, value = drawn(2, room, groups, width), drawn(2, room, groups, width)
    key[:, filled:], value[:, filled:] = float("nan"), float("nan")
    cache = Cache(key, value, places.to(device), torch.zeros(1, dtype=torch.long, device=device))
    q, k, v = drawn(2, queries * width), drawn(2, groups * width), drawn(2, groups * width)
    position = torch.tensor([read, read - 3], device=device)
    known = (drawn(meta, groups, width), drawn(meta, groups, width)) if meta else None
    frequency = THETA ** (-torch.arange(width // 2, device=device, dtype=torch.float64) / (width // 2))
    return q, k, v, cache, position, frequency, known


def expected_of(inputs: Inputs, window: int | None) -> tuple[Tensor, Cache]:
    """What the token reads ``[B, H * P]`` in float64, and the cache with its own column."""
    q, k, v, before, position, _, meta = inputs
    cache = Cache(before.key.clone(), before.value.clone(), before.places.clone(), before.offset)
    rows, room, groups, width = cache.key.shape
    column = int((position[0] + cache.offset) % room)
    cache.key[:, column] = apply_rotary(k.view(rows, 1, groups, width), position[:, None], THETA)[:, 0]
    cache.value[:, column] = v.view(rows, groups, width)
    cache.places[:, column] = position
    queries = apply_rotary(q.view(rows, 1, -1, width), position[:, None], THETA)[:, 0].double()
    found = []
    for row in range(rows):
        places, at = cache.places[row], position[row]
        seen = (places >= 0) & (places <= at) & (places > at - (window or 1 << 30))
        keys, values = cache.key[row][seen].double(), cache.value[row][seen].double()
        if meta is not None:
            keys, values = torch.cat([meta[0].double(), keys]), torch.cat([meta[1].double(), values])
        logits = torch.einsum("hgd,ngd->hgn", queries[row].view(groups, -1, width).transpose(0, 1), keys)
        shares = (logits / width**0.5).softmax(-1)
        found.append(torch.einsum("hgn,ngd->ghd", shares, values).flatten())
    return torch.stack(found), cache


def check(inputs: Inputs, window: int | None, tolerance: float) -> None:
    expected, cache = expected_of(inputs, window)
    q, k, v, written, position, frequency, meta = inputs
    heads = q.unflatten(-1, (-1, written.key.shape[3]))
    found = attend(heads, k, v, written, position, frequency=frequency, window=window, meta=meta).double()
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert torch.equal(inputs[3].places, cache.places) and torch.equal(inputs[3].value.isnan(), cache.value.isnan())
    written = inputs[3].key.nan_to_num().double(), cache.key.nan_to_num().double()
    assert float((written[0] - written[1]).norm() / written[1].norm()) < tolerance


@pytest.mark.parametrize(
    ("heads", "width", "room", "read", "window", "meta"),
    [
        ((4, 2), 8, 70, 66, None, 0),
        ((3, 1), 6, 40, 39, 9, 2),
        # The second time round: the oldest column is written over.
        ((2, 2), 8, 20, 27, 10, 0),
        ((2, 2), 16, 150, 3, None, 0),
    ],
)
def test_it_is_the_formula(
    heads: tuple[int, int], width: int, room: int, read: int, window: int | None, meta: int
) -> None:
    # float32, sums in another order.
    check(inputs_of(heads, width, room, read, meta, torch.float32, "cpu"), window, 1e-5)
