"""Jamba (``model_type: jamba``): ``models/jamba`` of transformers 5.23.

Mamba with norms of the time step, B and C; attention without positions in every few layers; MLPs and experts.
"""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import no_dropout
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.mamba_common import mixer_sources, time_step_rank
from longrecall.models.formats.moe_common import balance_of, coefficient, expert_sources, mlp_sources
from longrecall.models.formats.sources import same
from longrecall.models.formats.stock import common_fields, expansion, first_module, merged, modules
from longrecall.models.sizes import PlainConfig

_INNER_NORMS = ("dt", "b", "c")


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a JambaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    hidden = Fields(raw, where).integer("hidden_size", 4096)
    fields = Fields({**raw, "mamba_dt_rank": time_step_rank(raw.get("mamba_dt_rank", "auto"), hidden)}, where)
    fields.integer("hidden_size", 4096)
    fields.require("hidden_act", "silu", ["silu", "swish"], "the activation is a SiLU")
    fields.require("mamba_inner_layernorms", True, [True], "the time step, B and C have norms")
    fields.require("sliding_window", None, [None], "attention sees every token")
    eps = fields.number("rms_norm_eps", 1e-6)
    layers = fields.integer("num_hidden_layers", 32)
    mlps = _mlps(fields, layers)
    mamba = {
        "type": "mamba",
        "inner_dim": int(fields.number("mamba_expand", 2.0) * hidden),
        "state_dim": fields.integer("mamba_d_state", 16),
        "dt_rank": fields.integer("mamba_dt_rank"),
        "conv_width": fields.integer("mamba_d_conv", 4),
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "proj_bias": fields.flag("mamba_proj_bias", False),
        "input_norms": "weighted",
        "norm_eps": eps,
    }
    heads = fields.integer("num_attention_heads", 32)
    attention = {
        "type": "attention",
        "num_heads": heads,
        "kv_heads": fields.optional_integer("num_key_value_heads", 8 if "num_key_value_heads" not in raw else heads),
        "head_dim": fields.optional_integer("head_dim", hidden // heads),
        "rotary_share": 0.0,
    }
    with_attention = _places(fields, "attn_layer", 8, 4, layers)
    # Training and speed, and what is returned beside the logits.
    no_dropout(fields, "attention_dropout")
    fields.ignore("output_router_logits", "num_logits_to_keep", "calc_logits_for_entire_prompt")
    fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    config = {
        "vocab_size": fields.integer("vocab_size", 65536),
        "hidden_size": hidden,
        "norm_eps": eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings", 262144),
        **fields.token_ids(),
    }
    fields.finish()
    mixers = [attention if index in with_attention else mamba for index in range(layers)]
    return _layout(config, list(zip(mixers, mlps, strict=True)))


def _layout(config: dict[str, Any], layers: list[tuple[dict[str, Any], dict[str, Any]]]) -> Layout:
    """Build the layout of layers of a mixer and an MLP or experts; `config` holds the other keys of a native config."""
    tied = config["tie_word_embeddings"]
    sources = {
        "model.embeddings.weight": same("model.embed_tokens.weight"),
        "model.norm.weight": same("model.final_layernorm.weight"),
    }
    sources |= {} if tied else {"lm_head.weight": same("lm_head.weight")}
    for index, (mixer, mlp) in enumerate(layers):
        sources |= _layer_sources(f"model.layers.{index}.", mixer, mlp)
    blocks = [[{"name": "mixer", "module": mixer}, {"name": "mlp", "module": mlp}] for mixer, mlp in layers]
    plain = PlainConfig.from_dict({**config, "layers": [{"blocks": both} for both in blocks]})
    return Layout(plain, sources, copies={"lm_head.weight": "model.embeddings.weight"} if tied else {})


def _mlps(fields: Fields, layers: int) -> list[dict[str, Any]]:
    """Return the MLP or the experts of every layer."""
    inner = fields.integer("intermediate_size", 14336)
    experts = fields.integer("num_local_experts" if "num_local_experts" in fields.raw else "num_experts", 16)
    places = _places(fields, "expert_layer", 2, 1, layers) if experts > 1 else set()
    # Without experts nobody reads them.
    fields.ignore("expert_layer_period", "expert_layer_offset")
    moe = {
        "type": "moe",
        "num_experts": experts,
        "top_k": fields.integer("num_experts_per_tok", 2),
        "inner_size": inner,
        "normalise": False,
        "balance": balance_of(fields, len(places)),
    }
    return [moe if index in places else {"type": "mlp", "inner_size": inner} for index in range(layers)]


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the JambaConfig of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: layers of a kind that do not come at equal distances, which JambaConfig wants.
    """
    mamba, kinds = first_module(plain, "mamba"), [modules(layer) for layer in plain.layers]
    count, width, rank = len(kinds), plain.hidden_size, mamba["dt_rank"]
    if any(len(pair) != 2 for pair in kinds):
        raise UserError("every layer of Jamba has a mixer and an MLP or experts, and nothing else")
    attention = {index for index, pair in enumerate(kinds) if pair[0]["type"] == "attention"}
    with_experts = {index for index, pair in enumerate(kinds) if pair[1]["type"] == "moe"}
    inner = kinds[0][1].get("inner_size", 0)
    said = time_step_rank(kept.get("mamba_dt_rank", "auto"), width) == rank and bool(kept)
    fields = {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        **common_fields(plain),
        "intermediate_size": inner,
        "rms_norm_eps": plain.norm_eps,
        **_period(kept, "attn_layer", 8, 4, attention, count),
        "mamba_d_state": mamba["state_dim"],
        "mamba_d_conv": mamba["conv_width"],
        "mamba_expand": expansion(kept, "mamba_expand", mamba["inner_dim"], width),
        **({} if said else {"mamba_dt_rank": rank}),
        "mamba_conv_bias": mamba["conv_bias"],
        "mamba_proj_bias": mamba["proj_bias"],
    }
    if attention:
        module = first_module(plain, "attention")
        fields |= {"num_attention_heads": module["num_heads"], "num_key_value_heads": module["kv_heads"]}
        if "head_dim" in kept or module["head_dim"] != width // module["num_heads"]:
            fields["head_dim"] = module["head_dim"]
    if with_experts:
        module = first_module(plain, "moe")
        fields |= {
            "num_local_experts" if "num_local_experts" in kept else "num_experts": module["num_experts"],
            "num_experts_per_tok": module["top_k"],
            "router_aux_loss_coef": coefficient(kept, module["balance"], len(with_experts)),
            **_period(kept, "expert_layer", 2, 1, with_experts, count),
        }
    else:
        fields["num_experts"] = 1
    return merged(kept, fields)


def _layer_sources(place: str, mixer: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Source]:
    sources = {
        f"{place}mixer_norm.weight": same(f"{place}input_layernorm.weight"),
        f"{place}mlp_norm.weight": same(f"{place}pre_ff_layernorm.weight"),
    }
    if mixer["type"] == "attention":
        sources |= {f"{place}mixer.{name}_proj.weight": same(f"{place}self_attn.{name}_proj.weight") for name in "qkvo"}
    else:
        sources |= mixer_sources(mixer, f"{place}mixer.", f"{place}mamba.")
        for name in _INNER_NORMS:
            sources[f"{place}mixer.{name}_norm.weight"] = same(f"{place}mamba.{name}_layernorm.weight")
    if mlp["type"] == "mlp":
        return sources | mlp_sources(f"{place}mlp.", f"{place}feed_forward.")
    sources[f"{place}mlp.router.weight"] = same(f"{place}feed_forward.router.weight")
    return sources | expert_sources(f"{place}mlp.", f"{place}feed_forward.", mlp["num_experts"], mlp["inner_size"])


def _places(fields: Fields, kind: str, period: int, offset: int, layers: int) -> set[int]:
    """Return the layers of a kind, one in every `period` of them from `offset` on."""
    every = fields.integer(f"{kind}_period", period)
    first = fields.integer(f"{kind}_offset", offset, least=0)
    if first >= every:
        raise fields.fail(f"{kind}_offset", f"it must be less than {kind}_period ({every})")
    return set(range(first, layers, every))


def _period(kept: dict[str, Any], kind: str, period: int, offset: int, places: set[int], layers: int) -> dict[str, Any]:
    """Return the inverse of `_places`; UserError where the layers do not come at equal distances."""
    known = (kept.get(f"{kind}_period", period), kept.get(f"{kind}_offset", offset))
    ways = [known, *((every, first) for every in range(1, layers + 2) for first in range(min(every, layers + 1)))]
    for every, first in ways:
        if set(range(first, layers, every)) == places:
            return {f"{kind}_period": every, f"{kind}_offset": first}
    what = "attention" if kind == "attn_layer" else "experts"
    listed = ", ".join(map(str, sorted(places)))
    raise UserError(f"layers {listed} have {what}; JambaConfig wants equal distances between them")
