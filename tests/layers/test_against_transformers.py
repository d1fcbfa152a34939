"""The recurrent mixers of the hybrid families against transformers' own modules: outputs, steps, padding, gradients.

Every family has descriptions that differ in all that its reader tells apart. Modules of transformers run their plain
torch path here, whose weights are copied (or cut apart) into ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.zamba2 import modeling_zamba2

from longrecall.layers.mixers.registry import mixer_config

WIDTH, LENGTH, PADDING = 24, 37, 5
# 1e-4 is the promised parity in float32. Outputs are near 1 in size, so rounding alone gives a few 1e-6.
CLOSE = {"atol": 1e-4, "rtol": 0.0}
ZERO = torch.zeros(2, dtype=torch.long)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A module of transformers, the description that should be the same, and how tensors are carried over."""

    theirs: Callable[[], nn.Module]
    ours: dict[str, Any]
    carry: Callable[[Tensors], Tensors]


def renamed(names: dict[str, str]) -> Callable[[Tensors], Tensors]:
    """Replace beginnings of names; a convolution loses the dimension of its one input channel."""

    def carry(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            start = max((old for old in names if name.startswith(old)), key=len, default="")
            new = names[start] + name.removeprefix(start) if start else name
            found[new] = tensor.squeeze(1) if new == "conv.weight" else tensor
        return found

    return carry


MAMBA = renamed({"conv1d.": "conv.", "dt_layernorm.": "dt_norm.", "b_layernorm.": "b_norm.", "c_layernorm.": "c_norm."})


def hybrid(**options: Any) -> dict[str, Any]:
    """Options of a config of transformers: one layer of width `WIDTH`."""
    return {"hidden_size": WIDTH, "num_hidden_layers": 1, **options}


def mamba2_case(build: Callable[[], nn.Module], **ours: Any) -> Case:
    return Case(build, {"type": "mamba2", **ours}, MAMBA)


def falcon_h1(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = modeling_falcon_h1.FalconH1Config(**hybrid(mamba_chunk_size=8, **options))
        mixer = modeling_falcon_h1.FalconH1Mixer(config, 0)
        mixer.register_buffer("mup_vector", modeling_falcon_h1.compute_mup_vector(config), persistent=False)
        return mixer

    return build


def bamba(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"mamba_chunk_size": 8, "attn_layer_indices": [], **options}
    return lambda: modeling_bamba.BambaMixer(modeling_bamba.BambaConfig(**hybrid(**sizes)), 0)


def granite(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"layer_types": ["mamba"], "mamba_chunk_size": 8, **options}
    config = modeling_granitemoehybrid.GraniteMoeHybridConfig
    return lambda: modeling_granitemoehybrid.GraniteMoeHybridMambaLayer(config(**hybrid(**sizes)), 0)


def nemotron(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"layers_block_type": ["linear_attention"], "chunk_size": 8, **options}
    config = modeling_nemotron_h.NemotronHConfig
    return lambda: modeling_nemotron_h.NemotronHMamba2Mixer(config(hidden_size=WIDTH, **sizes), 0)


def zamba2(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"layers_block_type": ["linear_attention"], "chunk_size": 8, "num_attention_heads": 4, **options}
    return lambda: modeling_zamba2.Zamba2MambaMixer(modeling_zamba2.Zamba2Config(**hybrid(**sizes)), 0)


SIZES = {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 3, "mamba_d_state": 5}
OURS = {"inner_dim": 48, "head_dim": 8, "groups": 3, "state_dim": 5}
SMALL_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6}
MAMBA2 = {
    "bamba": mamba2_case(bamba(**SIZES), **OURS),
    "bamba_biases": mamba2_case(
        bamba(**SIZES, mamba_conv_bias=False, mamba_proj_bias=True, time_step_limit=(0.3, 0.8), rms_norm_eps=0.1),
        **OURS,
        conv_bias=False,
        proj_bias=True,
        time_step_limit=(0.3, 0.8),
        norm_eps=0.1,
    ),
    "bamba_gelu": mamba2_case(
        bamba(**SIZES, hidden_act="gelu", mamba_d_conv=3),
        **OURS,
        conv_activation="gelu",
        conv_width=3,
    ),
    "granite": mamba2_case(granite(**SIZES | {"mamba_n_groups": 1}), **OURS | {"groups": 1}),
    "granite_biases": mamba2_case(
        granite(**SIZES, mamba_proj_bias=True, hidden_act="gelu_pytorch_tanh"),
        **OURS,
        proj_bias=True,
        conv_activation="gelu_pytorch_tanh",
        norm_eps=1e-6,
    ),
    "granite_limits": mamba2_case(
        granite(**SIZES | {"mamba_n_groups": 2}, mamba_conv_bias=False, time_step_limit=(0.0, 0.5), rms_norm_eps=0.01),
        **OURS | {"groups": 2},
        conv_bias=False,
        time_step_limit=(0.0, 0.5),
        norm_eps=0.01,
    ),
    # inner_dim 40 is not expand * hidden_size.
    "nemotron": mamba2_case(
        nemotron(mamba_num_heads=5, mamba_head_dim=8, n_groups=5, ssm_state_size=4, time_step_min=0.4),
        **{"inner_dim": 40, "head_dim": 8, "groups": 5, "state_dim": 4, "time_step_limit": (0.4, None)},
    ),
    "nemotron_biases": mamba2_case(
        nemotron(mamba_num_heads=4, mamba_head_dim=6, n_groups=2, use_bias=True, ssm_state_size=4, conv_kernel=3),
        **{"inner_dim": 24, "head_dim": 6, "groups": 2, "state_dim": 4, "time_step_limit": (0.001, None)},
        proj_bias=True,
        conv_width=3,
    ),
    "nemotron_one_group": mamba2_case(
        nemotron(
            mamba_num_heads=4,
            mamba_head_dim=6,
            n_groups=1,
            use_conv_bias=False,
            ssm_state_size=9,
            layer_norm_epsilon=0.1,
        ),
        **{"inner_dim": 24, "head_dim": 6, "state_dim": 9, "time_step_limit": (0.001, None)},
        conv_bias=False,
        norm_eps=0.1,
    ),
    "zamba2": mamba2_case(
        zamba2(n_mamba_heads=6, mamba_ngroups=3, mamba_d_state=5),
        **OURS,
        time_step_limit=(0.001, None),
    ),
    "zamba2_bias": mamba2_case(
        zamba2(n_mamba_heads=12, mamba_ngroups=2, mamba_d_state=3, add_bias_linear=True, time_step_min=0.5),
        **{"inner_dim": 48, "head_dim": 4, "groups": 2, "state_dim": 3},
        time_step_limit=(0.5, None),
        proj_bias=True,
    ),
    "zamba2_wide": mamba2_case(
        zamba2(n_mamba_heads=8, mamba_expand=4, mamba_d_state=3, mamba_d_conv=2),
        **{"inner_dim": 96, "head_dim": 12, "state_dim": 3, "conv_width": 2},
        time_step_limit=(0.001, None),
    ),
    "falcon_h1": mamba2_case(
        falcon_h1(**SMALL_H1, ssm_multipliers=[0.5, 2.0, 0.7, 1.5, 0.3]),
        **{"inner_dim": 32, "head_dim": 8, "state_dim": 6},
        gated_norm="none",
        part_multipliers=[0.5, 2.0, 0.7, 1.5, 0.3],
    ),
    "falcon_h1_norm_first": mamba2_case(
        falcon_h1(
            **SMALL_H1 | {"mamba_n_groups": 2},
            mamba_rms_norm=True,
            mamba_norm_before_gate=True,
            projectors_bias=True,
            time_step_limit=(0.2, 0.9),
        ),
        **{"inner_dim": 32, "head_dim": 8, "state_dim": 6, "groups": 2},
        gated_norm="before_gate",
        out_bias=True,
        time_step_limit=(0.2, 0.9),
    ),
    "falcon_h1_gate_first": mamba2_case(
        falcon_h1(
            **SMALL_H1 | {"mamba_n_groups": 2, "mamba_d_conv": 3},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            ssm_multipliers=[1.0, 1.0, 1.0, 3.0, 1.0],
            rms_norm_eps=0.1,
        ),
        **{"inner_dim": 32, "head_dim": 8, "state_dim": 6, "groups": 2, "conv_width": 3},
        proj_bias=True,
        out_bias=False,
        conv_bias=False,
        part_multipliers=[1.0, 1.0, 1.0, 3.0, 1.0],
        norm_eps=0.1,
    ),
}


def falcon_mamba(**options: Any) -> Callable[[], nn.Module]:
    config = modeling_falcon_mamba.FalconMambaConfig
    return lambda: modeling_falcon_mamba.FalconMambaMixer(config(**hybrid(**options)), 0, False)


def jamba(**options: Any) -> Callable[[], nn.Module]:
    return lambda: modeling_jamba.JambaMambaMixer(modeling_jamba.JambaConfig(**hybrid(**options)), 0)


def mamba_case(build: Callable[[], nn.Module], **ours: Any) -> Case:
    return Case(build, {"type": "mamba", "inner_dim": 48, "state_dim": 5, "dt_rank": 3, **ours}, MAMBA)


JAMBA = {"mamba_d_state": 5, "mamba_dt_rank": 3}
MAMBA1 = {
    "falcon_mamba": mamba_case(falcon_mamba(state_size=5, time_step_rank=3), input_norms="plain"),
    "falcon_mamba_biases": mamba_case(
        falcon_mamba(state_size=5, time_step_rank=3, use_bias=True, use_conv_bias=False, mixer_rms_eps=0.1),
        **{"input_norms": "plain", "norm_eps": 0.1, "proj_bias": True, "conv_bias": False},
    ),
    "falcon_mamba_gelu": mamba_case(
        falcon_mamba(state_size=2, time_step_rank=4, expand=3, conv_kernel=3, hidden_act="gelu"),
        **{"input_norms": "plain", "state_dim": 2, "dt_rank": 4, "inner_dim": 72, "conv_width": 3},
        conv_activation="gelu",
    ),
    "jamba": mamba_case(jamba(**JAMBA), input_norms="weighted"),
    "jamba_biases": mamba_case(
        jamba(**JAMBA, mamba_proj_bias=True, mamba_conv_bias=False, rms_norm_eps=0.1),
        **{"input_norms": "weighted", "norm_eps": 0.1, "proj_bias": True, "conv_bias": False},
    ),
    "jamba_wide": mamba_case(
        jamba(mamba_d_state=2, mamba_dt_rank=7, mamba_expand=1, mamba_d_conv=2, hidden_act="gelu"),
        **{"input_norms": "weighted", "state_dim": 2, "dt_rank": 7, "inner_dim": 24, "conv_width": 2},
        conv_activation="gelu",
    ),
}


def convolutions(tensors: Tensors, keys: int, values: int) -> Tensors:
    """The one convolution over q, k and v, cut apart."""
    pieces = tensors["conv1d.weight"].squeeze(1).split((keys, keys, values))
    return {f"{name}_conv.weight": piece for name, piece in zip("qkv", pieces, strict=True)}


def qwen(tensors: Tensors, heads: int, values: int, key_dim: int, value_dim: int) -> Tensors:
    """Qwen3-Next keeps q, k, v and z of a key head together, and b and a; Qwen3.5 does not."""
    keys, share = heads * key_dim, values // heads
    found = {f"{name}": tensors[name] for name in ("A_log", "dt_bias")}
    found |= {"o_norm.weight": tensors["norm.weight"], "o_proj.weight": tensors["out_proj.weight"]}
    if "in_proj_qkv.weight" in tensors:
        sizes = (keys, keys, values * value_dim)
        parts = dict(zip("qkv", tensors["in_proj_qkv.weight"].split(sizes), strict=True))
        parts |= {"g": tensors["in_proj_z.weight"], "b": tensors["in_proj_b.weight"], "a": tensors["in_proj_a.weight"]}
    else:
        widths = (key_dim, key_dim, share * value_dim, share * value_dim)
        rows = tensors["in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split(widths, dim=1)
        parts = {name: part.flatten(0, 1) for name, part in zip("qkvg", rows, strict=True)}
        rows = tensors["in_proj_ba.weight"].unflatten(0, (heads, -1)).split((share, share), dim=1)
        parts |= {name: part.flatten(0, 1) for name, part in zip("ba", rows, strict=True)}
    found |= {f"{name}_proj.weight": part for name, part in parts.items()}
    return found | convolutions(tensors, keys, values * value_dim)


def delta_case(module: Any, family: str, heads: tuple[int, int, int, int], **options: Any) -> Case:
    key_heads, value_heads, key_dim, value_dim = heads
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": key_dim}
    sizes |= {"linear_value_head_dim": value_dim, "layer_types": ["linear_attention", "full_attention"]}
    theirs = {key: value for key, value in options.items() if key not in ("config", "norm_eps", "negative_eigenvalues")}
    config, mixer = getattr(module, options.get("config", f"{family}Config")), getattr(module, f"{family}GatedDeltaNet")
    ours = {"num_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    ours |= {"norm_eps": options.get("norm_eps", options.get("rms_norm_eps", 1e-6))}
    ours |= {"conv_width": options.get("linear_conv_kernel_dim", 4)}
    ours |= {"negative_eigenvalues": options.get("negative_eigenvalues", False)}

    def carry(tensors: Tensors) -> Tensors:
        if family != "OlmoHybrid":
            return qwen(tensors, *heads)
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("conv1d")}
        return kept | convolutions(tensors, key_heads * key_dim, value_heads * value_dim)

    return Case(
        lambda: mixer(config(**hybrid(**sizes, **theirs) | {"num_hidden_layers": 2}), 0),
        {"type": "gated_delta_net", **ours},
        carry,
    )


QWEN35 = {"config": "Qwen3_5TextConfig"}
OLMO = {"norm_eps": 1e-5, "pad_token_id": 0, "eos_token_id": 0}
DELTA = {
    "qwen3_5": delta_case(modeling_qwen3_5, "Qwen3_5", (2, 6, 5, 7), **QWEN35),
    "qwen3_5_equal_heads": delta_case(modeling_qwen3_5, "Qwen3_5", (3, 3, 8, 4), **QWEN35, rms_norm_eps=0.1),
    "qwen3_5_taps": delta_case(modeling_qwen3_5, "Qwen3_5", (1, 4, 6, 6), **QWEN35, linear_conv_kernel_dim=3),
    "qwen3_next": delta_case(modeling_qwen3_next, "Qwen3Next", (2, 6, 5, 7)),
    "qwen3_next_equal_heads": delta_case(modeling_qwen3_next, "Qwen3Next", (3, 3, 8, 4), rms_norm_eps=0.1),
    "qwen3_next_taps": delta_case(modeling_qwen3_next, "Qwen3Next", (1, 4, 6, 6), linear_conv_kernel_dim=3),
    "olmo_hybrid": delta_case(modeling_olmo_hybrid, "OlmoHybrid", (3, 3, 5, 7), **OLMO, linear_allow_neg_eigval=False),
    "olmo_hybrid_negative": delta_case(
        modeling_olmo_hybrid,
        "OlmoHybrid",
        (2, 4, 6, 5),
        **OLMO,
        linear_allow_neg_eigval=True,
        negative_eigenvalues=True,
    ),
    "olmo_hybrid_taps": delta_case(
        modeling_olmo_hybrid,
        "OlmoHybrid",
        (1, 3, 6, 6),
        **OLMO,
        linear_allow_neg_eigval=False,
        linear_conv_kernel_dim=2,
        rms_norm_eps=0.1,
    ),
}


def kda_case(build: Callable[[], nn.Module], heads: int, width: int, **ours: Any) -> Case:
    names = {"f_a_proj.": "f_proj.0.", "f_b_proj.": "f_proj.1.", "g_a_proj.": "g_proj.0.", "g_b_proj.": "g_proj.1."}
    rename = renamed({f"forget_gate.{old}": new for old, new in names.items() if old[0] == "f"} | names)

    def carry(tensors: Tensors) -> Tensors:
        found = {name.removeprefix("forget_gate."): tensor for name, tensor in rename(tensors).items()}
        found["A_log"] = found["A_log"].flatten()
        del found["conv1d.weight"]
        return found | convolutions(tensors, heads * width, heads * width)

    sizes = {"num_heads": heads, "key_dim": width, "value_dim": width, "gate_bias": False}
    return Case(build, {"type": "kda", **sizes, **ours}, carry)


def kimi(heads: int, width: int, **options: Any) -> Callable[[], nn.Module]:
    sizes = {"linear_num_heads": heads, "linear_head_dim": width, "layer_types": ["linear_attention"], **options}
    config = modeling_kimi_linear.KimiLinearConfig
    return lambda: modeling_kimi_linear.KimiLinearDeltaAttention(config(**hybrid(**sizes)), 0)


def glm(heads: int, width: int, **options: Any) -> Callable[[], nn.Module]:
    sizes = {"linear_num_heads": heads, "linear_head_dim": width, "layer_types": ["linear_attention"], **options}
    config = modeling_glm5_next.Glm5NextTextConfig
    return lambda: modeling_glm5_next.Glm5NextTextLinearAttention(config(**hybrid(**sizes)), 0)


KDA = {
    "kimi": kda_case(kimi(3, 5), 3, 5, norm_eps=1e-5),
    "kimi_eps": kda_case(kimi(2, 8, rms_norm_eps=0.1), 2, 8, norm_eps=0.1),
    "kimi_taps": kda_case(kimi(1, 6, linear_conv_kernel_dim=2), 1, 6, norm_eps=1e-5, conv_width=2),
    "glm_floor": kda_case(glm(3, 5, rms_norm_eps=1e-5), 3, 5, norm_eps=1e-5, decay_floor=-5.0),
    "glm_low_floor": kda_case(
        glm(2, 6, linear_lower_bound=-1.5, rms_norm_eps=0.1), 2, 6, norm_eps=0.1, decay_floor=-1.5
    ),
}
CASES = MAMBA2 | MAMBA1 | DELTA | KDA


def pair(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Their module and ours with the same weights, every one of them random, and an input."""
    case, generator = CASES[name], torch.Generator().manual_seed(7)
    theirs, ours = case.theirs().eval(), mixer_config(case.ours).build(WIDTH)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if key.endswith(("A_log", "dt_bias", "norm.weight", "D", "bias")):
                parameter.copy_(0.3 * drawn + (1.0 if key.endswith(("norm.weight", "D")) else 0.0))
            else:
                fan_in = parameter.shape[-1]
                parameter.copy_(drawn * (1.5 / fan_in**0.5))
    ours.load_state_dict(case.carry(theirs.state_dict()))
    return theirs, ours, torch.randn(2, LENGTH, WIDTH, generator=generator)


def output(theirs: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    found: Tensor = theirs(x, attention_mask=mask)
    return found


@pytest.mark.parametrize("name", CASES)
def test_outputs_steps_padding_and_gradients_are_theirs(name: str) -> None:
    theirs, ours, x = pair(name)
    theirs_x, ours_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = output(theirs, theirs_x)
    found, final = ours(ours_x, None, mask=None, position=ZERO)
    assert expected.std() > 0.05, "outputs so small that the tolerance would mean nothing"
    torch.testing.assert_close(found, expected, **CLOSE)

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / LENGTH
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, **CLOSE)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    for key, gradient in CASES[name].carry(gradients).items():
        torch.testing.assert_close(ours.get_parameter(key).grad, gradient, **CLOSE, msg=lambda m, k=key: f"{k}: {m}")

    with torch.no_grad():
        # A prompt, single tokens, and the rest.
        state, parts = None, []
        for start, end in ((0, 20), (20, 21), (21, 22), (22, LENGTH)):
            y, state = ours(x[:, start:end], state, mask=None, position=ZERO + start)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1), expected.detach(), **CLOSE)

        mask = torch.ones(2, PADDING + LENGTH, dtype=torch.bool)
        mask[0, :PADDING] = False
        rows = torch.cat([torch.full((2, PADDING, WIDTH), 3.0), x], 1)
        rows[1, :LENGTH], rows[1, LENGTH:] = x[1], 0.5
        padded, after = ours(rows, None, mask=mask, position=ZERO)
        left = output(theirs, rows, mask)
        torch.testing.assert_close(padded[0, PADDING:], expected[0].detach(), **CLOSE)
        torch.testing.assert_close(padded[1], left[1], **CLOSE)
        if not CASES[name].ours.get("proj_bias"):
            # Theirs convolve the bias of the projection at padded positions.
            torch.testing.assert_close(padded[0, PADDING:], left[0, PADDING:], **CLOSE)
        for key, tensor in final.items():
            torch.testing.assert_close(after[key][0], tensor[0].detach(), **CLOSE)
            torch.testing.assert_close(state[key], tensor.detach(), **CLOSE)
