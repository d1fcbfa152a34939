"""Record tiny fla checkpoints and their logits for tests/models/test_formats_fla.py.

fla needs an environment of its own (beside it transformers' Qwen3-Next fails on a CPU), so the tests read recorded
vectors:

    python3.11 -m venv fla-env && fla-env/bin/pip install torch transformers einops triton safetensors
    fla-env/bin/pip install --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0
    fla-env/bin/python experiments/reference_vectors/record_fla_vectors.py tests/models/vectors

What is proven: fla's own model classes are built (their constructors run without a GPU) and saved by `save_pretrained`,
so names, shapes and config.json are fla's. fla's kernels do not run on a CPU, so the logits come from fla's reference
functions (`naive_*`, `rms_norm_ref`, `rotary_embedding_ref`) and the model's own modules, wired as each layer's
`forward` wires its kernels. Everything is float32 and seeded.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, BATCH, VOCABULARY = 37, 2, 41


def heads_of(x: Tensor, width: int) -> Tensor:
    """`[B, T, H * width]` -> `[B, T, H, width]`."""
    return x.unflatten(-1, (-1, width))


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """RMS norm by fla's reference; a norm without scale has scale 1."""
    from fla.modules.norm.layernorm import rms_norm_ref

    weight = module.weight if module.weight is not None else x.new_ones(x.shape[-1])
    return rms_norm_ref(x, weight, None, eps=module.eps)


def convolve(x: Tensor, module: nn.Conv1d) -> Tensor:
    """Causal depthwise convolution and SiLU: what fla's ShortConvolution computes from an empty cache."""
    padded = F.pad(x.transpose(1, 2), (module.kernel_size[0] - 1, 0))
    return F.silu(F.conv1d(padded, module.weight, module.bias, groups=x.shape[-1])).transpose(1, 2)


def projections(attn: nn.Module, x: Tensor, silu_without_conv: bool) -> list[Tensor]:
    """q, k and v, flat, after their convolutions (or after a SiLU in the delta-rule layers without convolutions)."""
    found = []
    for name in "qkv":
        y = getattr(attn, f"{name}_proj")(x)
        if hasattr(attn, f"{name}_conv1d"):
            y = convolve(y, getattr(attn, f"{name}_conv1d"))
        elif silu_without_conv:
            y = F.silu(y)
        found.append(y)
    return found


def unit(x: Tensor) -> Tensor:
    """L2 norm as in fla's l2norm kernel: 1 / sqrt(sum + eps) with eps 1e-6."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, rotary: nn.Module) -> Tensor:
    """Rotary embedding of `[B, T, H, P]` by fla's reference and its own tables."""
    from fla.modules.rotary.ops import rotary_embedding_ref

    rotary._update_cos_sin_cache(x.shape[1], device=x.device, dtype=torch.float32)
    return rotary_embedding_ref(x, rotary._cos_cached[: x.shape[1]], rotary._sin_cached[: x.shape[1]])


def finish(attn: nn.Module, o: Tensor, x: Tensor, norm_module: nn.Module) -> Tensor:
    """Per-head norm, SiLU gate where there is one, output projection."""
    o = norm(o, norm_module)
    if hasattr(attn, "g_proj"):
        o = o * F.silu(heads_of(attn.g_proj(x), o.shape[-1]))
    return attn.o_proj(o.flatten(-2))


def head_norm(attn: nn.Module) -> nn.Module:
    """GLA's and RetNet's norm, whose name depends on fuse_norm."""
    return attn.g_norm_swish_gate if hasattr(attn, "g_norm_swish_gate") else attn.g_norm


def repeat_groups(x: Tensor, groups: int) -> Tensor:
    """Key/value heads -> query heads, along the head dimension of `[B, T, H, P]`."""
    return x.repeat_interleave(groups, dim=2)


def gla(attn: nn.Module, x: Tensor) -> Tensor:
    """layers/gla.py."""
    from fla.ops.gla.naive import naive_recurrent_gla

    q, k, v = projections(attn, x, silu_without_conv=False)
    gate = F.logsigmoid(heads_of(attn.gk_proj(x), attn.head_k_dim)) / attn.gate_logit_normalizer
    q, k, v = heads_of(q, attn.head_k_dim), heads_of(k, attn.head_k_dim), heads_of(v, attn.head_v_dim)
    k, v, gate = (repeat_groups(y, attn.num_kv_groups) for y in (k, v, gate))
    o, _ = naive_recurrent_gla(q, k, v, gate)
    return finish(attn, o, x, head_norm(attn))


def retnet(attn: nn.Module, x: Tensor) -> Tensor:
    """layers/multiscale_retention.py."""
    from fla.ops.retention.naive import naive_retention

    q, k, v = projections(attn, x, silu_without_conv=False)
    q, k, v = heads_of(q, attn.head_k_dim), heads_of(k, attn.head_k_dim), heads_of(v, attn.head_v_dim)
    q, k = rotate(q, attn.rotary), rotate(k, attn.rotary)
    k, v = repeat_groups(k, attn.num_kv_groups), repeat_groups(v, attn.num_kv_groups)
    o = naive_retention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2)
    return finish(attn, o, x, head_norm(attn))


def delta_net(attn: nn.Module, x: Tensor) -> Tensor:
    """layers/delta_net.py."""
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    q, k, v = projections(attn, x, silu_without_conv=True)
    q, k, v = heads_of(q, attn.head_k_dim), heads_of(k, attn.head_k_dim), heads_of(v, attn.head_v_dim)
    beta = attn.b_proj(x).sigmoid() * (2.0 if attn.allow_neg_eigval else 1.0)
    o, _ = delta_rule_recurrence(*(y.transpose(1, 2) for y in (unit(q), unit(k), v, beta)))
    return finish(attn, o.transpose(1, 2), x, attn.o_norm)


def gated_delta_net(attn: nn.Module, x: Tensor) -> Tensor:
    """layers/gated_deltanet.py."""
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v = projections(attn, x, silu_without_conv=True)
    q, k, v = heads_of(q, attn.head_k_dim), heads_of(k, attn.head_k_dim), heads_of(v, attn.head_v_dim)
    # The kernel gives value head i the query and key head i // (value heads / heads).
    q, k = (repeat_groups(unit(y), attn.num_v_heads // attn.num_heads) for y in (q, k))
    beta = attn.b_proj(x).sigmoid() * (2.0 if attn.allow_neg_eigval else 1.0)
    decay = naive_gdn_gate(attn.a_proj(x), attn.A_log, attn.dt_bias)
    o, _ = naive_recurrent_gated_delta_rule(q, k, v, beta, decay)
    return finish(attn, o, x, attn.o_norm)


def attention(attn: nn.Module, x: Tensor) -> Tensor:
    """layers/attn.py: rotary softmax attention; a window of w lets a token see w tokens, itself included."""
    q, k, v = (heads_of(getattr(attn, f"{name}_proj")(x), attn.head_dim) for name in "qkv")
    q, k = rotate(q, attn.rotary), rotate(k, attn.rotary)
    k, v = repeat_groups(k, attn.num_kv_groups), repeat_groups(v, attn.num_kv_groups)
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (distance >= 0) & (distance < (attn.window_size or x.shape[1]))
    o = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=seen)
    return attn.o_proj(o.transpose(1, 2).flatten(-2))


MIXERS = {
    "GatedLinearAttention": gla,
    "MultiScaleRetention": retnet,
    "DeltaNet": delta_net,
    "GatedDeltaNet": gated_delta_net,
    "Attention": attention,
}


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Forward pass of an fla causal language model on a CPU."""
    x = model.model.embeddings(tokens)
    for block in model.model.layers:
        x = x + MIXERS[type(block.attn).__name__](block.attn, norm(x, block.attn_norm))
        h = norm(x, block.mlp_norm)
        x = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(h)) * block.mlp.up_proj(h))
    return model.lm_head(norm(x, model.model.norm))


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part of a layer shows in the logits: fla's own start makes gates constant."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight") or "norm_swish_gate" in name:
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("A_log"):
            parameter.copy_(0.5 * noise)
        elif parameter.ndim < 2:
            parameter.copy_(noise - 1 if name.endswith("dt_bias") else noise)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        if "embeddings" in name:
            parameter.copy_(noise)


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 5, "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", {"num_heads": 2}),
    "gla_conv_shared": (
        "GLA",
        {
            "num_heads": 4,
            "num_kv_heads": 2,
            "use_short_conv": True,
            "conv_size": 3,
            "fuse_norm": False,
            "tie_word_embeddings": True,
        },
    ),
    "gla_hybrid": (
        "GLA",
        {"num_heads": 2, "use_output_gate": False, "elementwise_affine": False, "attn": WINDOWED, "expand_k": 0.25},
    ),
    "retnet": ("RetNet", {"num_heads": 2, "intermediate_size": None, "hidden_size": 16}),
    "retnet_shared": ("RetNet", {"num_heads": 4, "num_kv_heads": 1, "use_output_gate": False, "expand_v": 1}),
    "delta_net": ("DeltaNet", {"num_heads": 2}),
    "delta_net_gated": (
        "DeltaNet",
        {
            "num_heads": 2,
            "use_gate": True,
            "use_short_conv": False,
            "allow_neg_eigval": True,
            "tie_word_embeddings": True,
            "expand_k": 0.5,
        },
    ),
    "gated_delta_net": ("GatedDeltaNet", {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5}),
    "gated_delta_net_plain": (
        "GatedDeltaNet",
        {"num_heads": 2, "head_dim": 8, "use_gate": False, "use_short_conv": False, "allow_neg_eigval": True},
    ),
}


def record(name: str, folder: Path, seed: int) -> None:
    """Write one case: fla's own checkpoint files and `expected.safetensors` with `input_ids` and `logits`."""
    import fla.layers.attn
    import fla.models

    # The attention layer refuses to be built without flash-attn, which nothing here calls.
    fla.layers.attn.flash_attn_func = fla.layers.attn.flash_attn_func or logits_of
    family, options = CASES[name]
    torch.manual_seed(seed)
    model = getattr(fla.models, f"{family}ForCausalLM")(getattr(fla.models, f"{family}Config")(**{**COMMON, **options}))
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    logits = logits_of(model, tokens)
    save_file({"input_ids": tokens, "logits": logits.contiguous()}, folder / "expected.safetensors")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, logits std {logits.std():.2f}")


def main() -> None:
    """Record every case into the given folder."""
    parser = argparse.ArgumentParser(description="Record tiny fla checkpoints and their logits.")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for seed, name in enumerate(CASES):
        record(name, out / name, seed)


if __name__ == "__main__":
    main()
