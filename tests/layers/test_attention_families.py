"""The attention of each family against transformers' own module: same weights, same padded text, same outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from longrecall.layers.mixers.registry import mixer_config

LENGTH, ROWS = 23, 2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}


class Case(NamedTuple):
    """A small configuration of a family."""

    family: str
    """The prefix of transformers' classes."""
    given: dict[str, Any]
    """Fields of its config."""
    ours: dict[str, Any]
    """Our description, but for the sizes that all families name alike."""
    names: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Our name of a module -> theirs, where they differ."""


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


QWEN = {"qk_norm": "head", "qk_norm_offset": 1.0, "output_gate": True}
OLMO = {"qk_norm": "full"}
LFM = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
CASES: dict[str, Case] = {
    "qwen3_5": Case(
        "Qwen3_5Text", rope(500.0, partial_rotary_factor=0.25), QWEN | {"rotary_share": 0.25, "rope_theta": 500.0}
    ),
    "qwen3_5_bias": Case(
        "Qwen3_5Text",
        rope(900.0, partial_rotary_factor=0.5)
        | {"attention_bias": True, "rms_norm_eps": 1e-3, "num_key_value_heads": 4},
        QWEN | {"rotary_share": 0.5, "rope_theta": 900.0, "qkv_bias": True, "out_bias": True, "qk_norm_eps": 1e-3},
    ),
    "qwen3_5_yarn": Case(
        "Qwen3_5Text",
        {"rope_parameters": YARN | {"rope_theta": 700.0, "partial_rotary_factor": 0.5}, "num_key_value_heads": 1},
        QWEN | {"rotary_share": 0.5, "rope_theta": 700.0, "rope_scaling": YARN},
    ),
    "qwen3_next": Case(
        "Qwen3Next", rope(500.0, partial_rotary_factor=0.25), QWEN | {"rotary_share": 0.25, "rope_theta": 500.0}
    ),
    "qwen3_5_moe": Case("Qwen3_5MoeText", rope(50.0, partial_rotary_factor=1.0), QWEN | {"rope_theta": 50.0}),
    "olmo_hybrid": Case("OlmoHybrid", rope(5000.0), OLMO | {"rope_theta": 5000.0, "qk_norm_eps": 1e-6}),
    "olmo_hybrid_nope": Case(
        "OlmoHybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, OLMO | {"rotary_share": 0.0}
    ),
    "olmo_hybrid_yarn": Case(
        "OlmoHybrid",
        {"rope_parameters": YARN | {"rope_theta": 300.0}, "rms_norm_eps": 1e-2, "attention_bias": True},
        OLMO | {"rope_theta": 300.0, "rope_scaling": YARN, "qk_norm_eps": 1e-2, "qkv_bias": True, "out_bias": True},
    ),
    "nemotron_h": Case("NemotronH", {"head_dim": 16}, {"rotary_share": 0.0}),
    "nemotron_h_one_key_head": Case("NemotronH", {"head_dim": 10, "num_key_value_heads": 1}, {"rotary_share": 0.0}),
    "nemotron_h_wide": Case("NemotronH", {"head_dim": 32, "num_key_value_heads": 4}, {"rotary_share": 0.0}),
    "granite": Case(
        "GraniteMoeHybrid",
        {"position_embedding_type": "rope", "attention_multiplier": 0.11} | rope(200.0),
        {"scale": 0.11, "rope_theta": 200.0},
    ),
    "granite_nope": Case(
        "GraniteMoeHybrid",
        {"attention_multiplier": 0.5, "attention_bias": True},
        {"scale": 0.5, "rotary_share": 0.0, "qkv_bias": True, "out_bias": True},
    ),
    "granite_llama3": Case(
        "GraniteMoeHybrid",
        {
            "position_embedding_type": "rope",
            "attention_multiplier": 1.0,
            "rope_parameters": LLAMA3 | {"rope_theta": 80.0},
        },
        {"scale": 1.0, "rope_theta": 80.0, "rope_scaling": LLAMA3},
    ),
    "bamba": Case("Bamba", rope(10000.0), {"rotary_share": 0.5}),
    "bamba_bias": Case(
        "Bamba",
        rope(80.0) | {"attention_bias": True, "num_key_value_heads": 4},
        {"rope_theta": 80.0, "rotary_share": 0.5, "qkv_bias": True, "out_bias": True},
    ),
    "bamba_yarn": Case(
        "Bamba",
        {"rope_parameters": YARN | {"rope_theta": 80.0}},
        {"rope_theta": 80.0, "rotary_share": 0.5, "rope_scaling": YARN},
    ),
    "falcon_h1": Case("FalconH1", rope(1e11) | {"key_multiplier": 0.39}, {"rope_theta": 1e11, "key_multiplier": 0.39}),
    "falcon_h1_bias": Case(
        "FalconH1",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}, "attention_bias": True},
        {
            "rope_theta": 99.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "qkv_bias": True,
            "out_bias": True,
        },
    ),
    "falcon_h1_yarn": Case(
        "FalconH1",
        {"rope_parameters": YARN | {"rope_theta": 99.0}, "key_multiplier": 2.5, "num_key_value_heads": 1},
        {"rope_theta": 99.0, "rope_scaling": YARN, "key_multiplier": 2.5},
    ),
    "jamba_one_key_head": Case("Jamba", {"num_key_value_heads": 1}, {"rotary_share": 0.0}),
    "jamba_all_heads": Case("Jamba", {"num_key_value_heads": 4}, {"rotary_share": 0.0}),
    "jamba": Case("Jamba", {}, {"rotary_share": 0.0}),
    "zamba2": Case("Zamba2", {}, {"rotary_share": 0.0, "scale": 8**-0.5, "input_size": 64}),
    "zamba2_rope": Case(
        "Zamba2", {"use_mem_rope": True} | rope(40.0), {"rope_theta": 40.0, "scale": 8**-0.5, "input_size": 64}
    ),
    "zamba2_yarn": Case(
        "Zamba2",
        {"use_mem_rope": True, "rope_parameters": YARN | {"rope_theta": 40.0}, "num_key_value_heads": 4},
        {"rope_theta": 40.0, "rope_scaling": YARN, "scale": 8**-0.5, "input_size": 64},
    ),
    "recurrent_gemma_one_key_head": Case(
        "RecurrentGemma",
        {"attention_window_size": 3, "num_key_value_heads": 1} | rope(100.0, partial_rotary_factor=0.25),
        {"window": 3, "rope_theta": 100.0, "rotary_share": 0.25, "out_bias": True},
    ),
    "recurrent_gemma": Case(
        "RecurrentGemma",
        {"attention_window_size": 6} | rope(10.0, partial_rotary_factor=0.5),
        {"window": 6, "rope_theta": 10.0, "rotary_share": 0.5, "out_bias": True},
    ),
    "recurrent_gemma_bias": Case(
        "RecurrentGemma",
        {"attention_window_size": 40, "attention_bias": True} | rope(10.0, partial_rotary_factor=1.0),
        {"window": 40, "rope_theta": 10.0, "qkv_bias": True, "out_bias": True},
    ),
    "lfm2": Case(
        "Lfm2", rope(60.0) | {"norm_eps": 1e-4}, {"qk_norm": "head", "qk_norm_eps": 1e-4, "rope_theta": 60.0}, LFM
    ),
    "minimax": Case("MiniMax", rope(60.0) | {"head_dim": 16}, {"rope_theta": 60.0}),
    "kimi_linear": Case("KimiLinear", {}, {"rotary": False}),
    "kimi_linear_rank": Case(
        "KimiLinear", {"q_lora_rank": 11, "attention_bias": True}, {"rotary": False, "q_rank": 11, "bias": True}
    ),
    "kimi_linear_bias": Case("KimiLinear", {"attention_bias": True}, {"rotary": False, "bias": True}),
    "deepseek": Case("DeepseekV3", rope(70.0) | {"q_lora_rank": None}, {"rope_theta": 70.0}),
    "deepseek_halves": Case(
        "DeepseekV3",
        rope(70.0) | {"q_lora_rank": 9, "rope_interleave": False, "attention_bias": True},
        {"rope_theta": 70.0, "q_rank": 9, "interleaved": False, "bias": True},
    ),
    "deepseek_yarn": Case(
        "DeepseekV3",
        {"rope_parameters": YARN | {"rope_theta": 70.0, "mscale": 0.8, "mscale_all_dim": 1.2}, "q_lora_rank": 9},
        {"rope_theta": 70.0, "q_rank": 9, "rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}},
    ),
}
LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 9}
OWN_SIZES: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 16} for family in ("Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next")},
    **{family: LATENT | {"num_key_value_heads": 4} for family in ("KimiLinear", "DeepseekV3")},
    "GraniteMoeHybrid": {"mamba_n_heads": 4},
    "Jamba": {"num_hidden_layers": 8},
    "RecurrentGemma": {"num_hidden_layers": 3},
    "Zamba2": {"mamba_ngroups": 1, "num_mem_blocks": 1, "layers_block_type": ["linear_attention", "hybrid"]},
    "Bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    "FalconH1": {"head_dim": 16},
    "OlmoHybrid": {"layer_types": ["linear_attention", "full_attention"]},
}
LATENT_NAMES = {"kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "q_a_norm": "q_a_layernorm"}


def their_module(case: Case) -> tuple[nn.Module, nn.Module | None, Any]:
    """Their attention, what makes its cosines and sines (None = it has none), and their config."""
    config_class = getattr(transformers, f"{case.family}Config")
    config = config_class(**SIZES | OWN_SIZES.get(case.family, {}) | case.given)
    config._attn_implementation = "eager"
    family = case.family.removesuffix("Text")
    module = __import__(config_class.__module__.replace("configuration_", "modeling_"), fromlist=[family])
    if family == "Zamba2":
        attention = module.Zamba2Attention(config, layer_idx=1, num_fwd_mem_blocks=1, block_id=0)
    else:
        attention = getattr(module, f"{family}Attention")(config, layer_idx=1)
    maker = getattr(module, f"{case.family}RotaryEmbedding", None)
    without = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") is None or family == "RecurrentGemma"
    without |= family == "GraniteMoeHybrid" and config.position_embedding_type != "rope"
    return attention, None if maker is None or without else maker(config), config


def our_module(case: Case, config: Any, theirs: nn.Module) -> nn.Module:
    """Our layer with their weights."""
    if case.family in ("KimiLinear", "DeepseekV3"):
        sizes: dict[str, Any] = {
            "type": "mla",
            "num_heads": 4,
            "kv_rank": 12,
            "nope_dim": 6,
            "rope_dim": 4,
            "value_dim": 10,
        }
        names = LATENT_NAMES
    else:
        kv, width = config.num_key_value_heads, theirs.head_dim
        sizes = {"type": "attention", "num_heads": 4, "kv_heads": kv, "head_dim": width}
        names = case.names
    description = mixer_config(sizes | case.ours)
    layer = description.build(32)
    weights = theirs.state_dict()
    for name in layer.state_dict():
        module, _, kind = name.rpartition(".")
        layer.get_submodule(module).get_parameter(kind).data = weights.pop(
            f"{names.get(module, module)}.{kind}"
        ).clone()
    assert not weights and {n: tuple(t.shape) for n, t in layer.state_dict().items()} == description.tensor_shapes(32)
    return layer


def their_output(
    case: Case, theirs: nn.Module, angles: nn.Module | None, config: Any, x: Tensor, mask: Tensor
) -> Tensor:
    places = (mask.long().cumsum(1) - 1).clamp(min=0)
    column = torch.arange(LENGTH)
    visible = (column[None] <= column[:, None])[None] & mask[:, None]
    if case.family == "RecurrentGemma":
        visible &= column[None] > column[:, None] - config.attention_window_size
    visible |= ~visible.any(-1, keepdim=True)
    hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]
    given: dict[str, Any] = {"attention_mask": hidden, "position_embeddings": angles and angles(x, places)}
    if case.family == "RecurrentGemma":
        given = {"attention_mask": hidden, "position_ids": places}
    elif case.family in ("Jamba", "NemotronH", "KimiLinear"):
        given.pop("position_embeddings")
    given |= {"layer_idx": 1} if case.family == "Zamba2" else {}
    found: Tensor = theirs(x, **given)[0]
    return found


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_is_the_attention_of_transformers(name: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    theirs, angles, config = their_module(case)
    for parameter in theirs.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    ours = our_module(case, config, theirs)
    x = torch.randn(ROWS, LENGTH, case.ours.get("input_size", 32), generator=generator)
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [5]])
    expected = their_output(case, theirs, angles, config, x, mask)
    position = torch.zeros(ROWS, dtype=torch.long)
    found, _ = ours(x, None, mask=mask, position=position)
    whole, _ = ours(x[:1], None, mask=None, position=position[:1])
    # Scores of size 10 to 100 in float32 have roundings of 1e-6 to 8e-6, which their exponentials take on.
    for one, other in ((found[mask], expected[mask]), (whole, expected[:1])):
        assert float((one - other).abs().max() / other.abs().max()) < 1e-5
