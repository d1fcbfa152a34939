"""Hybrids of Mamba-2 and attention: how published and older files spell them, and what is refused."""

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
from tests.models.families.case import VOCABULARY, filled
from tests.models.round_trip import assert_round_trip
from tests.models.test_families_surgery import case_of

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


SPELLINGS = [
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
]


@pytest.mark.parametrize(("family", "name", "key", "change"), REFUSED, ids=[f"{row[0]}-{row[2]}" for row in REFUSED])
def test_what_cannot_be_reproduced_is_refused(family: str, name: str, key: str, change: dict[str, Any]) -> None:
    config = json.loads(case_of(family, name).build().config.to_json_string(use_diff=False)) | change
    with pytest.raises(UserError, match=f'"{key}"'.replace("[", r"\[").replace("]", r"\]")) as error:
        detect(config, "config.json").layout(config, "config.json")
    assert "\n" not in str(error.value)


def test_a_config_file_of_another_library_is_an_outline(tmp_path: Path) -> None:
    stock = filled(case_of("bamba", "published"))
    stock.save_pretrained(tmp_path)
    whole = open_checkpoint(tmp_path).plain
    assert open_outline(tmp_path / "config.json").plain == whole
    (tmp_path / "model.safetensors").unlink()
    assert open_outline(tmp_path).plain == whole
    with pytest.raises(UserError, match="has no weights"):
        open_checkpoint(tmp_path)
