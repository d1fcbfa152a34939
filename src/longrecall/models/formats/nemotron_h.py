"""Nemotron-H (``model_type: nemotron_h``): ``models/nemotron_h`` of transformers 5.23, and NVIDIA's own files.

Every layer has one module: Mamba-2, attention without positions, an MLP, or experts. Files name the kinds in a list
(`layers_block_type`) or, older ones, in a string (`hybrid_override_pattern`).

Of the time step transformers reads `time_step_min` as a lower limit, and not `time_step_limit`; so does longrecall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.errors import UserError
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import (
    ATTENTION,
    EXPERTS,
    MLP,
    RECURRENT,
    activation,
    conv_activation,
    find_module,
    layer_kinds,
    module_sources,
    no_dropout,
    written_kinds,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import either, same, stack
from longrecall.models.formats.stock import common_fields, merged, modules
from longrecall.models.sizes import PlainConfig

KINDS = {"M": RECURRENT, "*": ATTENTION, "-": MLP, "E": EXPERTS}
"""Letters of `hybrid_override_pattern`."""

_TYPES = {RECURRENT: "mamba2", ATTENTION: "attention", MLP: "mlp", EXPERTS: "moe"}

PREFIXES = ("backbone.", "model.")
"""Either spelling loads; files have the first one."""

OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
"""Keys that files may have in place of others; where a file has both, these count."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a NemotronHConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    older = {new: raw[old] for old, new in OLDER_NAMES.items() if old in raw}
    fields = Fields({key: value for key, value in raw.items() if key not in OLDER_NAMES} | older, where)
    hidden, norm_eps = fields.integer("hidden_size", 4096), fields.number("layer_norm_epsilon", 1e-5)
    kinds = _kinds(fields)
    readers = {RECURRENT: _mamba2, ATTENTION: _attention, MLP: _mlp, EXPERTS: _experts}
    modules_read = {kind: readers[kind](fields, norm_eps) for kind in readers if kind in kinds}
    _left_aside(fields)
    config = {
        "vocab_size": fields.integer("vocab_size", 131072),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": False,
        "residual_in_fp32": fields.flag("residual_in_fp32", False),
        "context_length": fields.optional_integer("max_position_embeddings"),
        **fields.token_ids(),
    }
    fields.finish()
    sources = {
        "model.embeddings.weight": _either("embeddings.weight"),
        "model.norm.weight": _either("norm_f.weight"),
        "lm_head.weight": same("lm_head.weight"),
    }
    for index, kind in enumerate(kinds):
        ours, theirs = f"model.layers.{index}.mixer", f"layers.{index}."
        sources[f"{ours}_norm.weight"] = _either(f"{theirs}norm.weight")
        sources |= _sources(modules_read[kind], hidden, f"{ours}.", f"{theirs}mixer.")
    layers = [{"blocks": [{"name": "mixer", "module": modules_read[kind]}]} for kind in kinds]
    plain = PlainConfig.from_dict({**config, "layers": layers})
    # Layers that predict further tokens stand behind the others.
    return Layout(plain, sources, travelling=("mtp.",))


def _kinds(fields: Fields) -> list[str]:
    """The kind of every layer, by transformers' names."""
    listed = "layers_block_type" if fields.get("layers_block_type") is not None else "layer_types"
    pattern, given = fields.get("hybrid_override_pattern"), fields.get(listed)
    if given is not None:
        kinds = layer_kinds(fields, listed, given, tuple(KINDS.values()))
    elif pattern is None:
        kinds = [RECURRENT, EXPERTS, ATTENTION, MLP]
    elif isinstance(pattern, str) and pattern and set(pattern) <= KINDS.keys():
        kinds = [KINDS[letter] for letter in pattern]
    else:
        raise fields.fail("hybrid_override_pattern", "it must be a string of M, *, - and E, a letter a layer")
    if fields.optional_integer("num_hidden_layers") not in (None, len(kinds)):
        raise fields.fail("num_hidden_layers", f"but {len(kinds)} layers are listed")
    return kinds


def _mamba2(fields: Fields, norm_eps: float) -> dict[str, Any]:
    heads, head_dim = fields.integer("mamba_num_heads", 128), fields.integer("mamba_head_dim", 64)
    bias = fields.flag("use_bias", False)
    fields.require("mamba_proj_bias", False, [False, bias], "use_bias alone gives projections a bias")
    return {
        "type": "mamba2",
        "inner_dim": heads * head_dim,
        "head_dim": head_dim,
        "state_dim": fields.integer("ssm_state_size", 128),
        "groups": fields.integer("n_groups", 8),
        "conv_width": fields.integer("conv_kernel", 4),
        "conv_bias": fields.flag("use_conv_bias", True),
        "proj_bias": bias,
        "time_step_limit": [fields.number("time_step_min", 0.001, zero=True), None],
        "norm_eps": norm_eps,
        "conv_activation": conv_activation(fields, "mamba_hidden_act"),
    }


def _attention(fields: Fields, norm_eps: float) -> dict[str, Any]:
    del norm_eps
    heads, head_dim = fields.integer("num_attention_heads", 32), fields.integer("head_dim", 128)
    fields.require("attention_head_dim", head_dim, [head_dim, None], "heads are as wide as head_dim says")
    fields.require("attention_bias", False, [False], "attention has no biases")
    # transformers has the key, but its attention looks at all tokens.
    fields.require("sliding_window", None, [None], "attention looks at all tokens")
    no_dropout(fields, "attention_dropout")
    return {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", 8),
        "head_dim": head_dim,
        "rotary_share": 0.0,
    }


def _mlp(fields: Fields, norm_eps: float) -> dict[str, Any]:
    del norm_eps
    return {
        "type": "mlp",
        "inner_size": fields.integer("intermediate_size", 21504),
        "gated": False,
        "activation": activation(fields, "mlp_hidden_act", "relu2"),
        "bias": fields.flag("mlp_bias", False),
    }


def _experts(fields: Fields, norm_eps: float) -> dict[str, Any]:
    del norm_eps
    fields.require("n_shared_experts", 1, [1], "there is one shared expert")
    return {
        "type": "moe",
        "num_experts": fields.integer("n_routed_experts", 8),
        "top_k": fields.integer("num_experts_per_tok", 2),
        "inner_size": fields.integer("moe_intermediate_size", 7688),
        "router": "sigmoid",
        "normalise": fields.flag("norm_topk_prob", True),
        # Experts are kept alike by the correction, not by a loss.
        "balance": 0.0,
        "gated": False,
        "activation": activation(fields, "mlp_hidden_act", "relu2"),
        "correction_bias": True,
        "groups": fields.integer("n_group", 1),
        "active_groups": fields.integer("topk_group", 1),
        "scale": fields.number("routed_scaling_factor", 1.0),
        "router_in_fp32": True,
        "latent_size": fields.optional_integer("moe_latent_size"),
        "shared_size": fields.integer("moe_shared_expert_intermediate_size", 7688),
        "bias": fields.flag("mlp_bias", False),
    }


def _left_aside(fields: Fields) -> None:
    """Mark what no module of this model reads, and what changes no output."""
    fields.require("tie_word_embeddings", False, [False], "transformers' class never ties the head")
    no_dropout(fields, "hidden_dropout")
    # Sizes of modules that this model does not have; how large Mamba-2 is follows from its heads.
    fields.ignore("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias")
    fields.ignore("use_bias", "mamba_proj_bias", "mamba_hidden_act", "expand", "chunk_size", "mamba_ssm_cache_dtype")
    fields.ignore("num_attention_heads", "num_key_value_heads", "head_dim", "attention_head_dim", "attention_bias")
    fields.ignore("attention_dropout", "sliding_window", "intermediate_size", "mlp_hidden_act", "mlp_bias")
    fields.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")
    fields.ignore("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap", "n_group")
    fields.ignore("topk_group", "norm_topk_prob", "routed_scaling_factor", "output_router_logits")
    # How weights were initialised, how many logits are returned, other names of the norm's epsilon.
    fields.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "time_step_rank")
    fields.ignore("rescale_prenorm_residual", "use_mamba_kernels", "num_logits_to_keep", "rms_norm_eps", "norm_eps")
    # Attention has no positions.
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    fields.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _either(name: str) -> Source:
    return same(*(f"{prefix}{name}" for prefix in PREFIXES))


_EXPERTS_NAMES = {
    "router.weight": "gate.weight",
    "correction_bias": "gate.e_score_correction_bias",
    "latent_in": "fc1_latent_proj",
    "latent_out": "fc2_latent_proj",
    "shared": "shared_experts",
}


def _sources(module: Mapping[str, Any], hidden: int, ours: str, theirs: str) -> dict[str, Source]:
    if module["type"] != "moe":
        return module_sources(module, hidden, ours, [f"{prefix}{theirs}" for prefix in PREFIXES])
    found: dict[str, Source] = {}
    for name in mixer_config(dict(module)).tensor_shapes(hidden):
        part = name.split(".")[0]
        foreign = _EXPERTS_NAMES.get(name, name.replace(part, _EXPERTS_NAMES.get(part, part), 1))
        found[f"{ours}{name}"] = (
            _experts_tensor(module["num_experts"], f"{theirs}{foreign}")
            if part == "experts"
            else _either(f"{theirs}{foreign}")
        )
    return found


def _experts_tensor(experts: int, stacked: str) -> Source:
    """One projection of all experts: a tensor for each of them in files, one for all in memory."""
    start, name = stacked.rsplit(".", 1)
    ways: list[Source] = []
    for prefix in PREFIXES:
        ways.append(stack(same(f"{prefix}{start}.{expert}.{name}.weight") for expert in range(experts)))
        ways.append(same(f"{prefix}{stacked}"))
    return either(*ways)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the NemotronHConfig of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: a layer that is none of the four kinds, or has more than one module.
    """
    kinds = []
    for index, layer in enumerate(plain.layers):
        found = [str(module["type"]) for module in modules(layer)]
        kind = next((kind for kind, name in _TYPES.items() if found == [name]), None)
        if kind is None or layer.get("mlp_size"):
            raise UserError(
                f"layer {index} has {' and '.join(found)}; a layer of nemotron_h has one of mamba2, "
                "attention, mlp and moe"
            )
        kinds.append(kind)
    fields = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **common_fields(plain),
        **_written_kinds(kinds, kept),
        "layer_norm_epsilon": plain.norm_eps,
        "residual_in_fp32": plain.residual_in_fp32,
        **_written_mamba2(find_module(plain, "mamba2")),
        **_written_attention(find_module(plain, "attention")),
        **_written_mlp(find_module(plain, "mlp")),
        **_written_experts(find_module(plain, "moe")),
    }
    if "num_hidden_layers" not in kept:
        del fields["num_hidden_layers"]
    spelt = {new: old for old, new in OLDER_NAMES.items() if old in kept}
    return merged(kept, {spelt.get(key, key): value for key, value in fields.items()})


def _written_kinds(kinds: list[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    listed = next((name for name in ("layers_block_type", "layer_types") if kept.get(name) is not None), None)
    if listed is None and kept.get("hybrid_override_pattern") is not None:
        letters = {kind: letter for letter, kind in KINDS.items()}
        return {"hybrid_override_pattern": "".join(letters[kind] for kind in kinds)}
    listed = listed or "layers_block_type"
    return {listed: written_kinds(kept.get(listed), kinds)}


def _written_mamba2(module: Mapping[str, Any] | None) -> dict[str, Any]:
    if module is None:
        return {}
    return {
        "mamba_num_heads": module["inner_dim"] // module["head_dim"],
        "mamba_head_dim": module["head_dim"],
        "ssm_state_size": module["state_dim"],
        "n_groups": module["groups"],
        "conv_kernel": module["conv_width"],
        "use_conv_bias": module["conv_bias"],
        "use_bias": module["proj_bias"],
        "time_step_min": module["time_step_limit"][0],
        "mamba_hidden_act": module.get("conv_activation", "silu"),
    }


def _written_attention(module: Mapping[str, Any] | None) -> dict[str, Any]:
    if module is None:
        return {}
    names = {"num_attention_heads": "num_heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
    return {theirs: module[ours] for theirs, ours in names.items()}


def _written_mlp(module: Mapping[str, Any] | None) -> dict[str, Any]:
    if module is None:
        return {}
    activation = module.get("activation", "silu")
    return {
        "intermediate_size": module["inner_size"],
        "mlp_hidden_act": activation,
        "mlp_bias": module.get("bias", False),
    }


def _written_experts(module: Mapping[str, Any] | None) -> dict[str, Any]:
    if module is None:
        return {}
    return {
        "n_routed_experts": module["num_experts"],
        "num_experts_per_tok": module["top_k"],
        "moe_intermediate_size": module["inner_size"],
        "norm_topk_prob": module["normalise"],
        "n_group": module.get("groups", 1),
        "topk_group": module.get("active_groups", 1),
        "routed_scaling_factor": module.get("scale", 1.0),
        "moe_latent_size": module.get("latent_size"),
        "moe_shared_expert_intermediate_size": module.get("shared_size", 0),
        "mlp_hidden_act": module.get("activation", "silu"),
        "mlp_bias": module.get("bias", False),
    }
