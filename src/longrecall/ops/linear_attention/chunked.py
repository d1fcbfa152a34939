r"""Chunked gated linear attention in plain torch, with per-channel, per-head or no decay.

Within a chunk of C tokens let :math:`G_i = \sum_{j \le i} g_j`. Then, with :math:`S` the state before the chunk,

.. math:: o_i = q_i e^{G_i} S + \sum_{j \le i} \big(\sum_d q_{id} k_{jd} e^{G_{id} - G_{jd}}\big) v_j, \qquad
          S' = e^{G_C} S + \sum_j (k_j e^{G_C - G_j})^\top v_j

(Yang et al. 2024, section 4; Dao and Gu 2024, section 6). No exponent is ever positive: with decays per channel a chunk
is split into sub-blocks, and decays are measured from the beginning of each. The states before all chunks of a segment
come from one matrix of decays between chunks. Segments follow one another. So memory grows linearly with T; without
gradients only the outputs do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.products import einsum_product, product

CHUNK = 64
SUB_BLOCK = 16
# Chunks of a segment: on a CPU few enough for its cache, elsewhere enough to keep the device busy.
SEGMENT_CHUNKS_CPU = 8
SEGMENT_CHUNKS = 16
# exp(-30) = 9e-14 is far below the 6e-8 of float32, and a bounded cumulative sum keeps its last digits.
STRONGEST_DECAY = {torch.float32: -30.0, torch.float64: -700.0}


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    state: Tensor,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.gated_linear_attention`; all tensors in the accumulation dtype.

    `products`: the dtype of matrix products (`products.py`), for one decay per head or none. With a decay per channel
    the exponentials take most of the time: bfloat16 products were no faster, and are not used.
    """
    low = products if log_decay is None or log_decay.dim() == 3 else None
    return _over_segments(q, k, v, log_decay, None, scale, state, low or v.dtype)


def merged_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mixing: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.merged_linear_attention`; scores are mixed before the product with the values."""
    return _over_segments(q, k, v, log_decay, mixing.to(v.dtype), scale, state, v.dtype)


def _over_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mixing: Tensor | None,
    scale: float,
    state: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    if log_decay is not None:
        log_decay = log_decay.clamp(min=STRONGEST_DECAY[log_decay.dtype])
    q = q * scale
    # split, not slices: the backward of a slice writes a gradient of the whole length.
    step = CHUNK * segment_chunks(q)
    pieces = [x.split(step, dim=1) for x in (q, k, v)]
    decays = [None] * len(pieces[0]) if log_decay is None else log_decay.split(step, dim=1)
    outputs = []
    for q_n, k_n, v_n, decay in zip(*pieces, decays, strict=True):
        out, state = _segment(q_n, k_n, v_n, decay, mixing, state, dtype)
        outputs.append(out)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def _segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mixing: Tensor | None,
    state: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One segment. Value heads are held as [B, G, R]: R of them read each of the G key heads; `dtype` of products."""
    length, groups = q.shape[1:3]
    q, k, v = to_chunks(q), to_chunks(k), to_chunks(v)
    if mixing is None:
        values = v.unflatten(1, (groups, -1))
    else:
        values = v.permute(0, 2, 3, 1, 4).flatten(3)[:, None, None].expand(-1, groups, -1, -1, -1, -1)
    if log_decay is not None and log_decay.dim() == 4:
        scores, increments, total, q, scale_in = _channel_decay(q, k, values, log_decay)
    else:
        scores, increments, total, scale_in = _head_decay(q, k, values, log_decay, dtype)
    before, state = carry(increments, total, state.unflatten(1, (groups, -1)))
    inter = einsum_product("bgnck,bgrnkv->bgrncv", q, before, dtype)
    if scale_in is not None:
        inter = inter * scale_in
    if mixing is None:
        out = (product(scores, values, dtype) + inter).flatten(1, 2)
    else:
        out = _mixed(scores[:, :, 0], v, inter[:, :, 0], mixing)
    return from_chunks(out, length), state.flatten(1, 2)


def _channel_decay(
    q: Tensor, k: Tensor, values: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
    """Scores, state increments, total log decay of each chunk and decayed queries, for one decay per key channel."""
    cumulative = to_chunks(log_decay).cumsum(-2)
    last = cumulative[..., -1:, :]
    keys = (k * (last - cumulative).exp()).transpose(-1, -2)[:, :, None]
    scores = channel_scores(q, k, cumulative)[:, :, None]
    return scores, keys @ values, last.squeeze(-2)[:, :, None], q * cumulative.exp(), None


def _head_decay(
    q: Tensor, k: Tensor, values: Tensor, log_decay: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores, state increments, total log decay of each chunk, decay of queries; for one decay per head, or none."""
    size, groups = q.shape[-2], q.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    scores = product(q, k.transpose(-1, -2), dtype).masked_fill(~causal, 0.0)[:, :, None]
    # einsum makes one wide product for all heads of a group; a product with k[:, :, None] would repeat k.
    increments = "bgnck,bgrncv->bgrnkv"
    if log_decay is None:
        total = q.new_zeros((*values.shape[:4], 1))
        return scores, einsum_product(increments, k, values, dtype), total, None
    decay = F.pad(log_decay, (0, 0, 0, -log_decay.shape[1] % size)).unflatten(1, (-1, size))
    cumulative = decay.movedim(-1, 1).cumsum(-1).unflatten(1, (groups, -1))
    between = (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(~causal, 0.0).exp()
    to_end = (cumulative[..., -1:] - cumulative).exp()[..., None]
    written = einsum_product(increments, k, values * to_end, dtype)
    return scores * between, written, cumulative[..., -1:], cumulative.exp()[..., None]


def _mixed(scores: Tensor, v: Tensor, inter: Tensor, mixing: Tensor) -> Tensor:
    """Mix over key heads: scores [B,H,N,C,C], values [B,H,N,C,V], inter [B,H,N,C,H*V] -> [B,H,N,C,V]."""
    heads = mixing.shape[0]
    mixed = torch.einsum("ij,bincd->bjncd", mixing, scores)
    return mixed @ v + torch.einsum("ij,bincjv->bjncv", mixing, inter.unflatten(-1, (heads, -1)))


def channel_scores(q: Tensor, k: Tensor, cumulative: Tensor) -> Tensor:
    r"""Causal scores :math:`A_{ij} = \sum_d q_{id} k_{jd} e^{G_{id} - G_{jd}}` for j <= i, zero above the diagonal.

    `q`, `k` and the inclusive cumulative log decay are ``[..., C, K]``; returns ``[..., C, C]``. Sub-block I of the
    queries is measured from the decay just before it, so both factors of every product are at most 1 in decay.
    """
    size, block = q.shape[-2], min(SUB_BLOCK, q.shape[-2])
    diagonal = _diagonal_scores(*(x.unflatten(-2, (-1, block)) for x in (q, k, cumulative)))
    rows = []
    for index, start in enumerate(range(0, size, block)):
        parts = [diagonal[..., index, :, :]]
        if start:
            reference = cumulative[..., start - 1 : start, :]
            queries = q[..., start : start + block, :] * (cumulative[..., start : start + block, :] - reference).exp()
            keys = k[..., :start, :] * (reference - cumulative[..., :start, :]).exp()
            parts.insert(0, queries @ keys.transpose(-1, -2))
        rows.append(F.pad(torch.cat(parts, dim=-1), (0, size - start - block)))
    return torch.cat(rows, dim=-2)


def _diagonal_scores(q: Tensor, k: Tensor, cumulative: Tensor) -> Tensor:
    """The same scores inside one sub-block, ``[..., c, K]`` -> ``[..., c, c]``, by the explicit sum over channels."""
    size = q.shape[-2]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[..., None]
    distance = cumulative[..., :, None, :] - cumulative[..., None, :, :]
    weight = distance.masked_fill(~causal, float("-inf")).exp()
    return (q[..., :, None, :] * weight * k[..., None, :, :]).sum(-1)


def carry(increments: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the state over chunks: :math:`S_{n+1} = e^{total_n} S_n + increment_n`.

    `increments` ``[..., N, K, V]``, `total` log decay ``[..., N, K]`` or ``[..., N, 1]``, `state` ``[..., K, V]``.
    Returns the states before each chunk ``[..., N, K, V]`` and the state after the last.
    """
    chunks = increments.shape[-3]
    sums = F.pad(total.cumsum(-2), (0, 0, 1, 0)).movedim(-2, -1)
    sums, later = sums[..., :, None], sums[..., None, :]
    causal = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=total.device).tril()
    decay = (sums - later).masked_fill(~causal, float("-inf")).exp()
    sources = torch.cat([state.unsqueeze(-3), increments], dim=-3)
    if total.shape[-1] == 1:
        states = (decay.squeeze(-3) @ sources.flatten(-2)).unflatten(-1, sources.shape[-2:])
    else:
        states = (decay @ sources.movedim(-3, -2)).movedim(-2, -3)
    return states[..., :-1, :, :], states[..., -1, :, :]


def to_chunks(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` -> ``[B, H, N, C, D]``, padded at the end with zeros; C shrinks for short sequences."""
    size = chunk_size(x.shape[1])
    chunks: Tensor = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size)).movedim(3, 1)
    return chunks


def from_chunks(x: Tensor, length: int) -> Tensor:
    """The inverse of `to_chunks`: ``[B, H, N, C, D]`` -> ``[B, T, H, D]``."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def chunk_size(length: int) -> int:
    """The chunk length: `CHUNK`, or the next multiple of `SUB_BLOCK` for shorter sequences."""
    return min(CHUNK, -(-length // SUB_BLOCK) * SUB_BLOCK)


def segment_chunks(x: Tensor) -> int:
    """How many chunks to work on together on the device of `x`."""
    return SEGMENT_CHUNKS_CPU if x.device.type == "cpu" else SEGMENT_CHUNKS
