"""Hybrids of state spaces or KDA and attention: how published and older files spell them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import longrecall
from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.formats import FORMATS, detect
from longrecall.models.outline import open_outline
from tests.models.families.case import VOCABULARY, case_of, filled
from tests.models.round_trip import assert_round_trip

TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Nemotron-H as it is in memory: another prefix, all experts in one tensor; further tensors travel along."""
    found = {name.replace("backbone.", "model.", 1): tensor for name, tensor in tensors.items()}
    for name in [name for name in found if ".experts.0." in name]:
        start, part = name.split(".0.")
        every = [found.pop(f"{start}.{index}.{part}") for index in range(8)]
        found[f"{start}.{part.removesuffix('.weight')}"] = torch.stack(every)
    return found | {"mtp.layers.0.norm.weight": torch.ones(3, dtype=torch.bfloat16)}


def in_memory_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Granite 4 as it is in memory."""
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    found = {}
    for name, tensor in tensors.items():
        place, dot, end = name.partition("block_sparse_moe.")
        found[place + dot + names[end] if dot else name] = tensor
    return found


def older_nemotron(config: dict[str, Any]) -> None:
    for new, old in (
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
        ("expand", "mamba_expand"),
        ("time_step_min", "mamba_dt_min"),
        ("time_step_limit", "mamba_dt_limit"),
        ("use_conv_bias", "mamba_conv_bias"),
        ("chunk_size", "mamba_chunk_size"),
    ):
        config[old] = config.pop(new)
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    config |= {"num_hidden_layers": 4, "norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 1.0}
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "time_step_rank": 256}


def older_rope(config: dict[str, Any]) -> None:
    given = config.pop("rope_parameters")
    config["rope_theta"] = given["rope_theta"]
    config["rope_scaling"] = None


def older_granite(config: dict[str, Any]) -> None:
    older_rope(config)
    config["layer_types"] = [{"full_attention": "attention"}.get(kind, "mamba") for kind in config["layer_types"]]
    config |= {"normalization_function": "rmsnorm", "init_method": "mup"}


def older_falcon(config: dict[str, Any]) -> None:
    older_rope(config)
    config |= {"attn_layer_indices": None, "mamba_use_mlp": True, "mamba_d_head": "auto"}


def older_jamba(config: dict[str, Any]) -> None:
    config |= {"mamba_dt_rank": "auto", "mamba_inner_layernorms": True, "num_logits_to_keep": 1, "sliding_window": None}
    config["num_local_experts"] = config.pop("num_experts")


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of Jamba and Kimi-Linear as they are in memory: all in one tensor, gates first."""
    found = dict(tensors)
    names = (["gate_proj", "up_proj"], ["w1", "w3"], ["down_proj"], ["w2"])
    last = ("experts.0.down_proj.weight", "experts.0.w2.weight")
    for place in [name.partition("experts.0.")[0] for name in tensors if name.endswith(last)]:
        for parts in names:
            experts, place_of = [], f"{place}experts"
            while f"{place_of}.{len(experts)}.{parts[0]}.weight" in found:
                experts.append(torch.cat([found.pop(f"{place_of}.{len(experts)}.{part}.weight") for part in parts]))
            if experts:
                found[f"{place_of}.{'gate_up_proj' if len(parts) == 2 else 'down_proj'}"] = torch.stack(experts)
    return found


def kimi_in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in together(tensors).items():
        gate = any(part in name for part in (".A_log", ".dt_bias", ".f_a_proj", ".f_b_proj"))
        name = name.replace("self_attn.", "self_attn.forget_gate.") if gate else name
        found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for name in [name for name in found if "q_conv1d" in name]:
        parts = [found.pop(name.replace("q_conv1d", f"{one}_conv1d")) for one in "qkv"]
        found[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return found


def kimi_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers saves, but for the MLP of the first layer, which it renames as if there were experts."""
    return {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): x for name, x in tensors.items()}


def kimi_of_the_class(config: dict[str, Any]) -> None:
    names = {"num_experts": "num_local_experts", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob"}
    names |= {"num_experts_per_token": "num_experts_per_tok", "model_max_length": "max_position_embeddings"}
    config |= {new: config.pop(old) for old, new in names.items()}


def older_zamba(config: dict[str, Any]) -> None:
    older_rope(config)
    kinds = config.pop("layers_block_type")
    config["layer_types"] = ["mamba" if kind == "linear_attention" else kind for kind in kinds]


SPELLINGS = [
    ("jamba", "published", older_jamba, together),
    ("kimi_linear", "published", lambda config: None, kimi_published),
    ("kimi_linear", "groups", kimi_of_the_class, kimi_in_memory),
    ("zamba2", "published", older_zamba, None),
    ("nemotron_h", "everything", older_nemotron, stacked),
    ("granitemoehybrid", "experts", older_granite, in_memory_names),
    ("bamba", "published", older_rope, None),
    ("falcon_h1", "published", older_falcon, None),
]


@pytest.mark.parametrize(("family", "name", "config", "tensors"), SPELLINGS, ids=[row[0] for row in SPELLINGS])
def test_older_spellings_are_read_and_kept(
    family: str, name: str, config: Callable[..., None], tensors: Callable[..., Any] | None, tmp_path: Path
) -> None:
    stock = filled(case_of(family, name))
    stock.save_pretrained(tmp_path / "theirs")
    edit_config(tmp_path / "theirs", config)
    if tensors is not None:
        edit_tensors(tmp_path / "theirs", tensors)
    with torch.no_grad():
        # As in test_families.py: float32 sums in another order.
        ours = longrecall.load(tmp_path / "theirs")(TOKENS).logits
        torch.testing.assert_close(ours, stock(TOKENS, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert_round_trip(tmp_path / "theirs", tmp_path / "native")


def test_a_changed_model_is_written_in_the_spelling_that_was_read(tmp_path: Path) -> None:
    filled(case_of("nemotron_h", "everything")).save_pretrained(tmp_path)
    edit_config(tmp_path, older_nemotron)
    kept = json.loads((tmp_path / "config.json").read_text())
    plain = open_checkpoint(tmp_path).plain
    plain.layers = [plain.layers[0]] * 2 + plain.layers[1:]
    form = FORMATS["nemotron_h"]
    assert form.stock_config is not None
    written = form.stock_config(plain, kept)
    assert written["hybrid_override_pattern"] == "MME*-" and written["num_hidden_layers"] == 5
    assert "n_groups" not in written and form.layout(written, "config.json").plain.layers == plain.layers


REFUSED = [
    ("nemotron_h", "dense", "hybrid_override_pattern", {"layers_block_type": None, "hybrid_override_pattern": "MX"}),
    ("nemotron_h", "dense", "layers_block_type", {"layers_block_type": ["mamba", "hyena"]}),
    ("nemotron_h", "dense", "num_hidden_layers", {"num_hidden_layers": 7}),
    ("nemotron_h", "dense", "tie_word_embeddings", {"tie_word_embeddings": True}),
    ("nemotron_h", "dense", "sliding_window", {"sliding_window": 128}),
    ("nemotron_h", "dense", "attention_bias", {"attention_bias": True}),
    ("nemotron_h", "dense", "attention_head_dim", {"attention_head_dim": 16}),
    ("nemotron_h", "dense", "mlp_hidden_act", {"mlp_hidden_act": "tanh"}),
    ("nemotron_h", "dense", "mamba_hidden_act", {"mamba_hidden_act": "relu"}),
    ("nemotron_h", "dense", "mamba_proj_bias", {"mamba_proj_bias": True}),
    ("nemotron_h", "dense", "hidden_dropout", {"hidden_dropout": 0.1}),
    ("nemotron_h", "dense", "time_step_min", {"time_step_min": -1}),
    ("nemotron_h", "experts", "n_shared_experts", {"n_shared_experts": 2}),
    ("granitemoehybrid", "experts", "position_embedding_type", {"position_embedding_type": "alibi"}),
    ("granitemoehybrid", "experts", "layer_types", {"layer_types": ["mamba", "moe", "mamba"]}),
    ("granitemoehybrid", "experts", "num_hidden_layers", {"num_hidden_layers": 4}),
    ("granitemoehybrid", "experts", "normalization_function", {"normalization_function": "layernorm"}),
    ("granitemoehybrid", "experts", "mamba_d_head", {"mamba_d_head": 5}),
    ("granitemoehybrid", "experts", "attention_dropout", {"attention_dropout": 0.5}),
    ("bamba", "published", "attn_layer_indices", {"attn_layer_indices": [3]}),
    ("bamba", "published", "z_loss_coefficient", {"z_loss_coefficient": 0.1}),
    ("bamba", "published", "rope_parameters", {"rope_parameters": {"rope_theta": None}}),
    ("bamba", "published", "partial_rotary_factor", {"partial_rotary_factor": 0.25}),
    ("bamba", "published", "mamba_n_heads", {"mamba_n_heads": 7, "mamba_d_head": "auto"}),
    ("falcon_h1", "published", "ssm_multipliers", {"ssm_multipliers": [1.0, 1.0]}),
    ("falcon_h1", "published", "mlp_multipliers[1]", {"mlp_multipliers": [1.0, "x"]}),
    ("falcon_h1", "published", "mamba_use_mlp", {"mamba_use_mlp": False}),
    ("falcon_h1", "published", "attn_layer_indices", {"attn_layer_indices": [1]}),
    ("falcon_h1", "published", "num_attention_heads", {"num_attention_heads": 5, "head_dim": None}),
    ("falcon_h1", "published", "a_new_option", {"a_new_option": 3}),
    ("falcon_mamba", "published", "hidden_act", {"hidden_act": "gelu"}),
    ("falcon_mamba", "published", "mixer_rms_eps", {"mixer_rms_eps": 0}),
    ("jamba", "published", "hidden_act", {"hidden_act": "gelu"}),
    ("jamba", "published", "mamba_inner_layernorms", {"mamba_inner_layernorms": False}),
    ("jamba", "published", "sliding_window", {"sliding_window": 128}),
    ("jamba", "published", "attn_layer_offset", {"attn_layer_offset": 4}),
    ("jamba", "published", "router_aux_loss_coef", {"router_aux_loss_coef": -1}),
    ("jamba", "published", "attention_dropout", {"attention_dropout": 0.5}),
    ("kimi_linear", "published", "mla_use_nope", {"mla_use_nope": False}),
    ("kimi_linear", "published", "moe_router_activation_func", {"moe_router_activation_func": "softmax"}),
    ("kimi_linear", "published", "moe_layer_freq", {"moe_layer_freq": 2}),
    ("kimi_linear", "published", "num_nextn_predict_layers", {"num_nextn_predict_layers": 1}),
    ("kimi_linear", "published", "num_key_value_heads", {"num_key_value_heads": 1}),
    ("kimi_linear", "published", "tie_word_embeddings", {"tie_word_embeddings": True}),
    ("kimi_linear", "published", "layer_types", {"layer_types": ["full_attention"]}),
    ("kimi_linear", "published", "mlp_layer_types", {"mlp_layer_types": ["dense", "sparse", "moe"]}),
    ("kimi_linear", "published", "gate_lower_bound", {"linear_attn_config": {"gate_lower_bound": -5.0}}),
    ("kimi_linear", "groups", "use_grouped_topk", {"use_grouped_topk": False}),
    ("zamba2", "published", "layers_block_type", {"layers_block_type": ["mamba", "hybrid", "moe", "mamba", "hybrid"]}),
    ("zamba2", "published", "num_hidden_layers", {"num_hidden_layers": 4}),
    ("zamba2", "published", "hybrid_layer_ids", {"hybrid_layer_ids": [1]}),
    ("zamba2", "published", "n_mamba_heads", {"n_mamba_heads": 5}),
    ("zamba2", "published", "mamba_headdim", {"mamba_headdim": 8}),
    ("zamba2", "published", "num_attention_heads", {"num_attention_heads": 5}),
    ("zamba2", "published", "attention_head_dim", {"attention_head_dim": 8}),
    ("zamba2", "published", "use_long_context", {"use_long_context": True}),
    ("zamba2", "published", "use_shared_mlp_adapter", {"use_shared_mlp_adapter": False}),
    ("zamba2", "published", "hidden_act", {"hidden_act": "tanh"}),
    ("zamba2", "attention_adapters", "num_key_value_heads", {"num_key_value_heads": 2}),
]


@pytest.mark.parametrize(("family", "name", "key", "change"), REFUSED, ids=[f"{row[0]}-{row[2]}" for row in REFUSED])
def test_what_cannot_be_reproduced_is_refused(family: str, name: str, key: str, change: dict[str, Any]) -> None:
    config = json.loads(case_of(family, name).build().config.to_json_string(use_diff=False)) | change
    with pytest.raises(UserError, match=f'"{key}"'.replace("[", r"\[").replace("]", r"\]")) as error:
        detect(config, "config.json").layout(config, "config.json")
    assert "\n" not in str(error.value)


def test_a_kimi_config_whose_lists_of_layers_do_not_fit() -> None:
    config = json.loads(case_of("kimi_linear", "published").build().config.to_json_string(use_diff=False))
    config |= {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}}
    with pytest.raises(UserError, match=r'"full_attn_layers" is .* must name every layer from 1 to 3 once'):
        FORMATS["kimi_linear"].layout(config, "config.json")


def test_jamba_wants_equal_distances(tmp_path: Path) -> None:
    filled(case_of("jamba", "dense")).save_pretrained(tmp_path)
    plain = open_checkpoint(tmp_path).plain
    stock_config = FORMATS["jamba"].stock_config
    assert stock_config is not None
    plain.layers = [plain.layers[kind] for kind in (0, 0, 1, 0, 0, 1, 0)]
    assert {key: stock_config(plain, {})[f"attn_layer_{key}"] for key in ("period", "offset")} == {
        "period": 3,
        "offset": 2,
    }
    plain.layers = [plain.layers[kind] for kind in (0, 2, 2, 1)]
    with pytest.raises(UserError, match="layers 1, 2 have attention; JambaConfig wants equal distances"):
        stock_config(plain, {})


def test_a_config_file_of_another_library_is_an_outline(tmp_path: Path) -> None:
    stock = filled(case_of("bamba", "published"))
    stock.save_pretrained(tmp_path)
    whole = open_checkpoint(tmp_path).plain
    assert open_outline(tmp_path / "config.json").plain == whole
    (tmp_path / "model.safetensors").unlink()
    assert open_outline(tmp_path).plain == whole
    with pytest.raises(UserError, match="has no weights"):
        open_checkpoint(tmp_path)
