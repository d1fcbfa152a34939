"""Granite 4 (``model_type: granitemoehybrid``): ``models/granitemoehybrid`` of transformers 5.23.

Mamba-2 layers, attention in a few, and after each an MLP that every token takes, alone or beside experts. Embeddings,
scores, outputs of blocks and logits have scalar factors.
"""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import (
    ATTENTION,
    RECURRENT,
    Block,
    activation,
    attention_fields,
    decoder_layout,
    find_module,
    first_of,
    inverse_number,
    layer_kinds,
    mamba2_fields,
    module_sources,
    rotation_fields,
    times,
    written_attention,
    written_kinds,
    written_mamba2,
    written_rope,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same, split
from longrecall.models.formats.stock import common_fields, expansion, merged
from longrecall.models.sizes import PlainConfig

ROPE = "rope"


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a GraniteMoeHybridConfig (parsed; `where` names the file in errors).

    Raises:
        UserError: what cannot be reproduced.
    """
    fields = Fields(raw, where)
    hidden, norm_eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-6)
    layers = fields.integer("num_hidden_layers", 32)
    kinds = _kinds(fields, layers)
    mixers = {
        RECURRENT: ("mamba", mamba2_fields(fields, hidden, norm_eps)),
        ATTENTION: ("self_attn", _attention(fields, hidden)),
    }
    fields.require("normalization_function", "rmsnorm", ["rmsnorm", None], "norms are RMS norms")
    # How weights were initialised; what the stock class returns beside its loss.
    fields.ignore("init_method", "output_router_logits")
    config = {
        "vocab_size": fields.integer("vocab_size", 32000),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings"),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "logits_multiplier": 1 / fields.number("logits_scaling", 1.0),
        **fields.token_ids(),
    }
    multiplier, second = fields.number("residual_multiplier", 1.0), _channel_mixer(fields, hidden, layers)
    fields.finish()

    def block(place: str, module: dict[str, Any]) -> Block:
        return Block(
            module,
            lambda ours, theirs: module_sources(module, hidden, ours, f"{theirs}{place}."),
            "input_layernorm",
        )

    first = {kind: block(place, module) for kind, (place, module) in mixers.items()}
    return decoder_layout(config, [(first[kind], second) for kind in kinds], final_norm="norm", multiplier=multiplier)


def _kinds(fields: Fields, layers: int) -> list[str]:
    name = "layer_types" if fields.get("layer_types") is not None else "layers_block_type"
    if fields.get(name) is None:
        return [RECURRENT] * layers
    kinds = layer_kinds(fields, name, fields.get(name), (RECURRENT, ATTENTION))
    if len(kinds) != layers:
        raise fields.fail("num_hidden_layers", f'but "{name}" lists {len(kinds)} layers')
    return kinds


def _attention(fields: Fields, hidden: int) -> dict[str, Any]:
    fields.require("position_embedding_type", None, [None, "nope", ROPE], "other positions are missing")
    # Without rotation, what is said about it has no effect; where it is wrong, it is refused all the same.
    turned = rotation_fields(fields, plain_share=False)
    return {
        **attention_fields(fields, hidden),
        "scale": fields.number("attention_multiplier", 1.0),
        **(turned if fields.get("position_embedding_type") == ROPE else {"rotary_share": 0.0}),
    }


def _channel_mixer(fields: Fields, hidden: int, layers: int) -> Block:
    """The shared MLP, alone or beside experts."""
    shared, experts = fields.integer("shared_intermediate_size", 1024), fields.integer("num_local_experts", 8, least=0)
    # Without experts nothing reads these.
    fields.ignore("num_experts_per_tok", "router_aux_loss_coef", "intermediate_size")
    norm, function = "post_attention_layernorm", activation(fields, "hidden_act", "silu")

    def shared_sources(ours: str, theirs: str) -> dict[str, Source]:
        gate, up = split(f"{theirs}shared_mlp.input_linear.weight", (shared, shared))
        down = same(f"{theirs}shared_mlp.output_linear.weight")
        return {f"{ours}gate_proj.weight": gate, f"{ours}up_proj.weight": up, f"{ours}down_proj.weight": down}

    if not experts:
        return Block({"type": "mlp", "inner_size": shared, "activation": function}, shared_sources, norm)
    module = {
        "type": "moe",
        "num_experts": experts,
        "top_k": fields.integer("num_experts_per_tok", 2),
        "inner_size": fields.integer("intermediate_size", 11008),
        "router": "top_k_softmax",
        "balance": fields.number("router_aux_loss_coef", 0.001, zero=True) / layers,
        "activation": function,
        "shared_size": shared,
    }

    def sources(ours: str, theirs: str) -> dict[str, Source]:
        # Files have the first name, models in memory the second.
        names = {
            "router.weight": ("router.layer.weight", "router.weight"),
            "experts.gate_up_proj": ("input_linear.weight", "experts.gate_up_proj"),
            "experts.down_proj": ("output_linear.weight", "experts.down_proj"),
        }
        found = {
            f"{ours}{own}": same(*(f"{theirs}block_sparse_moe.{name}" for name in other))
            for own, other in names.items()
        }
        return found | shared_sources(f"{ours}shared.", theirs)

    return Block(module, sources, norm)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the GraniteMoeHybridConfig of a native model as plain data; `kept`: the one that it was read from, or {}.

    Raises:
        UserError: there is no Mamba-2 layer and no attention, or neither an MLP nor experts.
    """
    layers, channel = plain.layer_configs(), first_of(plain, "moe", "mlp")
    fields = {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **common_fields(plain),
        **_written_mixers(plain, kept),
        **_written_channel_mixer(channel, len(layers), kept),
        "rms_norm_eps": plain.norm_eps,
        "embedding_multiplier": plain.embedding_multiplier,
        "logits_scaling": inverse_number(kept, "logits_scaling", plain.logits_multiplier),
        "residual_multiplier": layers[0].blocks[0].multiplier,
    }
    return merged(kept, fields)


def _written_mixers(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    types = {"mamba2": RECURRENT, "attention": ATTENTION}
    kinds = []
    for index, layer in enumerate(plain.layer_configs()):
        if layer.mixer.type not in types:
            raise UserError(f"layer {index} is {layer.mixer.type}; a layer of granitemoehybrid is mamba2 or attention")
        kinds.append(types[layer.mixer.type])
    name = "layers_block_type" if kept.get("layer_types") is None and kept.get("layers_block_type") else "layer_types"
    unsaid = kept and kept.get(name) is None and set(kinds) == {RECURRENT}
    fields: dict[str, Any] = {} if unsaid else {name: written_kinds(kept.get(name), kinds)}
    mixer, attention = find_module(plain, "mamba2"), find_module(plain, "attention")
    if mixer is not None:
        fields |= written_mamba2(mixer, plain.hidden_size, kept)
        fields["mamba_expand"] = expansion(kept, "mamba_expand", mixer["inner_dim"], plain.hidden_size)
    if attention is not None:
        turned = attention.get("rotary_share", 1.0) > 0
        said = kept.get("position_embedding_type")
        fields |= written_attention(attention, plain.hidden_size, kept)
        fields |= written_rope(attention, kept, plain_share=False) if turned else {}
        fields |= {
            "attention_multiplier": attention.get("scale", attention["head_dim"] ** -0.5),
            "position_embedding_type": ROPE if turned else None if said == ROPE else said,
        }
    return fields


def _written_channel_mixer(module: dict[str, Any], layers: int, kept: dict[str, Any]) -> dict[str, Any]:
    function = {"hidden_act": module.get("activation", "silu")}
    if module["type"] == "mlp":
        return {**function, "num_local_experts": 0, "shared_intermediate_size": module["inner_size"]}
    return {
        **function,
        "num_local_experts": module["num_experts"],
        "num_experts_per_tok": module["top_k"],
        "intermediate_size": module["inner_size"],
        "shared_intermediate_size": module.get("shared_size", 0),
        "router_aux_loss_coef": times(kept, "router_aux_loss_coef", module["balance"], layers),
    }
