"""Reading a text with retrieval, whole or in segments that follow, without gradients: a layer in a dozen launches.

A prompt of a few thousand tokens is launched more slowly than a GPU reads it; in plain torch most of a retrieval
layer's launches are small steps between the products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.layers.access import may_read
from longrecall.layers.retrieval.weights import Blend, Encoder, RetrievalWeights
from longrecall.layers.tokens import KeptTokens, TokenContext
from longrecall.ops.retrieval.op import BEST_CHUNKS, SELECTED_ATTENTION, selected_attention


def why_not(mixer: RetrievalWeights, x: Tensor, context: TokenContext, mask: Tensor | None) -> str | None:
    """Why x ``[B, T, d]`` is not read by `read` but in plain torch, in words; None = it is."""
    config, like = mixer.config, mixer.k_proj.weight
    # In segments the last tokens may be padding, which nobody reads.
    padded = mask is not None and context.memory is None
    if torch.is_grad_enabled() or padded or context.embedded is None or mixer.temperature is None:
        return "gradients, padding, earlier tokens or a hard selector"
    if not x.is_cuda or torch.is_autocast_enabled(x.device.type) or x.dtype != like.dtype:
        return "not on a GPU, or mixed dtypes"
    if not may_read(mixer.query_encoder, Encoder) or not (mixer.blend is None or may_read(mixer.blend, Blend)):
        return "an adapter on the query encoder or the blend, or hooks"
    q, queries = x.new_empty((0, 1, config.num_heads, config.head_dim)), x.new_empty((0, 1, config.encoder_dim))
    chosen = x.new_empty((0, config.candidates))
    found = BEST_CHUNKS.why_plain({"queries": queries, "chosen": chosen})
    return found or SELECTED_ATTENTION.why_plain({"q": q, "k": q[:, :, : config.kv_heads], "v": q})


def read(
    mixer: RetrievalWeights,
    x: Tensor,
    y: Tensor,
    vectors: Tensor,
    context: TokenContext,
    kept: KeptTokens | None = None,
) -> Tensor:
    """x and the mixer's output y ``[B, T, d]``, chunk vectors ``[B, N, E]``, N >= 1 -> the layer's output.

    `kept`: all that the context's memory keeps for the layer, where there is one.
    """
    from longrecall.ops.decoding.triton.retrieval import blend
    from longrecall.ops.retrieval.triton.retrieval import choose_chunks

    config, own, memory = mixer.config, mixer.blend, context.memory
    assert mixer.temperature is not None and context.embedded is not None
    # Of any norm: the kernel divides the scores by it.
    queries = F.linear(x, mixer.query_encoder.weight)
    chosen, weights, share = choose_chunks(
        queries, vectors, mixer.temperature, config.chunk, config.candidates, config.top_k,
        None if memory is None else memory.positions[0, :1],
    )  # fmt: skip
    heads = (-1, config.head_dim)
    if kept is None:
        keys, values = (proj(context.embedded).unflatten(-1, heads) for proj in (mixer.k_proj, mixer.v_proj))
    else:
        keys, values = kept.keys, kept.values
    q = mixer.q_proj(x).unflatten(-1, heads)
    found = selected_attention(q, keys, values, chosen, weights, config.chunk, backend="triton")
    found = mixer.o_proj(found.flatten(-2))
    part = None if own is None or own.weight is None else F.linear(x, own.weight).flatten(0, 1)
    bias = None if own is None else own.bias
    lines = (y.flatten(0, 1).contiguous(), found.flatten(0, 1), share.flatten())
    positions = x.shape[1] if memory is None else memory.positions.flatten()
    return blend(*lines, positions, config.chunk, config.alpha, bias, part).view_as(y)
