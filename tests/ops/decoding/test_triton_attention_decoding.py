"""One token of softmax attention on a cache with room, against the formula in float64."""

from __future__ import annotations

from collections.abc import Set

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longrecall.layers.descriptions.rotary import Rotation
from longrecall.layers.rotary import turned, turns
from longrecall.ops.decoding.triton.attention import Cache, QueryKeyNorm, attend
from longrecall.ops.kernels import launch

pytestmark = pytest.mark.skipif(
    not launch.interpreting(), reason="needs TRITON_INTERPRET=1; the GPU has test_gpu_attention_decoding.py"
)

THETA = 100.0
OPTIONS = {"gated", "normed", "offset", "half", "still", "capped", "scaled"}
"""A gate; norms, with a scale of 1 + weight; half of the channels or none is turned; a soft cap; another scale."""
CAP, SCALE, MAGNITUDE, EPS = 1.5, 0.3, 1.2, 1e-3
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


def prepared(x: Tensor, weight: Tensor, position: Tensor, options: Set[str]) -> Tensor:
    """Heads ``[B, H, P]`` normed and turned, in float64."""
    width = x.shape[-1]
    x = x.double()
    if "normed" in options:
        scale = weight.double() + (1 if "offset" in options else 0)
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale
    if "still" in options:
        return x
    rotation = Rotation(width // 2 if "half" in options else width, THETA)
    by = turns(rotation, position[:, None], torch.float64)
    both = turned(x[:, None], by)[:, 0]
    factor = torch.where(torch.arange(width, device=x.device) < rotation.channels, MAGNITUDE, 1.0)
    return both * factor if "scaled" in options else both


def expected_of(
    inputs: Inputs, window: int | None, options: Set[str], weights: tuple[Tensor, Tensor], gate: Tensor
) -> tuple[Tensor, Cache]:
    """What the token reads ``[B, H * P]`` in float64, and the cache with its own column."""
    q, k, v, before, position, _, meta = inputs
    cache = Cache(before.key.clone(), before.value.clone(), before.places.clone(), before.offset)
    rows, _, groups, width = cache.key.shape
    column = int((position[0] + cache.offset) % cache.key.shape[1])
    cache.key[:, column] = prepared(k.view(rows, groups, width), weights[1], position, options).to(k.dtype)
    cache.value[:, column] = v.view(rows, groups, width)
    cache.places[:, column] = position
    queries = prepared(q.view(rows, -1, width), weights[0], position, options)
    found = []
    for row in range(rows):
        places, at = cache.places[row], position[row]
        seen = (places >= 0) & (places <= at) & (places > at - (window or 1 << 30))
        keys, values = cache.key[row][seen].double(), cache.value[row][seen].double()
        if meta is not None:
            keys, values = torch.cat([meta[0].double(), keys]), torch.cat([meta[1].double(), values])
        logits = torch.einsum("hgd,ngd->hgn", queries[row].view(groups, -1, width).transpose(0, 1), keys)
        logits = logits * (SCALE if "scaled" in options else width**-0.5)
        shares = (CAP * (logits / CAP).tanh() if "capped" in options else logits).softmax(-1)
        read = torch.einsum("hgn,ngd->ghd", shares, values).flatten()
        found.append(read * gate[row].double().sigmoid().flatten() if "gated" in options else read)
    return torch.stack(found), cache


def check(inputs: Inputs, window: int | None, tolerance: float, options: Set[str] = frozenset()) -> None:
    assert options <= OPTIONS
    q, k, v, written, position, frequency, meta = inputs
    width, g = written.key.shape[3], torch.Generator().manual_seed(1)
    weights = tuple(torch.randn(width, generator=g).to(q) for _ in range(2))
    heads = q.unflatten(-1, (-1, width))
    gate = torch.randn(heads.shape, generator=g).to(q)
    expected, cache = expected_of(inputs, window, options, (weights[0], weights[1]), gate)
    # As a projection has them: every head's gate after its query.
    heads, gate = torch.cat([heads, gate], dim=-1).split(width, dim=-1)
    frequency = frequency[::2].contiguous() if "half" in options else frequency
    found = attend(
        heads,
        k,
        v,
        written,
        position,
        frequency=None if "still" in options else frequency,
        magnitude=MAGNITUDE if "scaled" in options else 1.0,
        scale=SCALE if "scaled" in options else None,
        window=window,
        soft_cap=CAP if "capped" in options else None,
        meta=meta,
        norms=QueryKeyNorm(*weights, EPS, "offset" in options) if "normed" in options else None,
        gate=gate if "gated" in options else None,
    ).double()
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert torch.equal(inputs[3].places, cache.places) and torch.equal(inputs[3].value.isnan(), cache.value.isnan())
    keys = inputs[3].key.nan_to_num().double(), cache.key.nan_to_num().double()
    assert float((keys[0] - keys[1]).norm() / keys[1].norm()) < tolerance


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


@pytest.mark.parametrize(
    ("heads", "width", "room", "read", "window", "meta", "options"),
    [
        ((4, 2), 8, 70, 66, None, 0, {"gated", "normed", "offset", "half"}),
        ((3, 1), 6, 40, 39, 9, 2, {"still", "capped", "scaled", "normed"}),
        ((2, 2), 8, 20, 27, 10, 0, {"capped", "scaled", "half"}),
        ((2, 2), 16, 150, 3, None, 0, {"still", "gated"}),
    ],
)
def test_its_options(
    heads: tuple[int, int], width: int, room: int, read: int, window: int | None, meta: int, options: Set[str]
) -> None:
    # float32, sums in another order.
    check(inputs_of(heads, width, room, read, meta, torch.float32, "cpu"), window, 1e-5, options)
