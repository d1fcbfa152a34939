"""Qwen3-Next, Qwen3.5, OLMo Hybrid: other spellings of tensors and keys, what travels along, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoHybridForCausalLM

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.export.exporting import export_checkpoint
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.formats import detect
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.stock import stock_layout
from tests.models.families import olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.families.case import Case, filled
from tests.models.round_trip import as_native, assert_round_trip

Tensors = dict[str, Tensor]


def named(cases: list[Case], name: str) -> Case:
    return next(case for case in cases if case.name == name)


def respelt(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a checkpoint with other tensors in its file."""
    out = folder.parent / f"{folder.name}_respelt"
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = {name: tensor.contiguous() for name, tensor in change(load_file(folder / "model.safetensors")).items()}
    save_file(stored, out / "model.safetensors")
    return out


def stacked_experts(stored: Tensors) -> Tensors:
    """As newer files have them: all experts of a layer in two tensors."""
    kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for place in sorted({name.partition(".experts.")[0] for name in stored if ".experts." in name}):
        gate, up, down = (
            torch.stack([stored[f"{place}.experts.{i}.{name}_proj.weight"] for i in range(5)])
            for name in ("gate", "up", "down")
        )
        kept[f"{place}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        kept[f"{place}.experts.down_proj"] = down
    return kept


def inside_a_model(stored: Tensors) -> Tensors:
    """As a text model is stored that was cut out of the one that reads images."""
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}


def fused_convolutions(stored: Tensors) -> Tensors:
    """As the class of OLMo Hybrid has its tensors in memory."""
    names = ["model.layers.0.linear_attn." + f"{name}_conv1d.weight" for name in "qkv"]
    whole = torch.cat([stored.pop(name) for name in names])
    renamed = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in renamed.items():
        stored[f"model.layers.0.{new}.weight"] = stored.pop(f"model.layers.0.{old}.weight")
    return stored | {"model.layers.0.linear_attn.conv1d.weight": whole}


SPELLINGS = [
    (named(qwen3_next.CASES, "published"), stacked_experts),
    (named(qwen3_5_moe.CASES, "published"), stacked_experts),
    (named(qwen3_5.CASES, "text_stretched"), inside_a_model),
    (named(olmo_hybrid.CASES, "published"), fused_convolutions),
]


@pytest.mark.parametrize(("case", "change"), SPELLINGS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_other_spellings_are_the_same_model_and_stay(
    case: Case, change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    filled(case).save_pretrained(tmp_path / "theirs")
    other = respelt(tmp_path / "theirs", change)
    wanted, found = open_checkpoint(tmp_path / "theirs"), open_checkpoint(other)
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.names())
    assert_round_trip(other, tmp_path / "native")


def test_convolutions_cut_into_thirds_are_read_and_written_whole(tmp_path: Path) -> None:
    """transformers cuts so on saving, whatever the widths of queries, keys and values are."""
    case = named(olmo_hybrid.CASES, "published")
    stock = filled(case)
    stock.save_pretrained(tmp_path / "theirs")
    OlmoHybridForCausalLM.save_pretrained(stock, tmp_path / "thirds")
    sizes = [
        load_file(tmp_path / name / "model.safetensors")["model.layers.0.linear_attn.q_conv1d.weight"].shape[0]
        for name in ("theirs", "thirds")
    ]
    assert sizes == [24, 32]
    wanted, found = open_checkpoint(tmp_path / "theirs"), open_checkpoint(tmp_path / "thirds")
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.names())
    export_checkpoint(tmp_path / "thirds", tmp_path / "stock")
    again = OlmoHybridForCausalLM.from_pretrained(tmp_path / "stock")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())
    written = load_file(tmp_path / "stock" / "model.safetensors")
    assert written["model.layers.0.linear_attn.q_conv1d.weight"].shape[0] == 24


@pytest.mark.parametrize(
    "case", [qwen3_5.CASES[1], qwen3_5_moe.CASES[0], qwen3_next.CASES[1], olmo_hybrid.CASES[1]], ids=str
)
@torch.no_grad()
def test_a_config_made_anew_describes_the_same_model(case: Case, tmp_path: Path) -> None:
    """Of a model that reads images the text model is left."""
    stock = filled(case)
    stock.save_pretrained(tmp_path / "theirs")
    export_checkpoint(tmp_path / "theirs", tmp_path / "anew", to=case.format, new_config=True)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "anew", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    tokens = torch.arange(1, 12)[None]
    assert torch.equal(again(tokens, use_cache=False).logits, stock(tokens, use_cache=False).logits)


@pytest.mark.parametrize("case", [qwen3_5.CASES[0], qwen3_next.CASES[0]], ids=str)
def test_what_predicts_several_tokens_travels_along(case: Case, tmp_path: Path) -> None:
    """Published files have decays and norms in float32, the rest in bfloat16, and layers that no stock class reads."""

    def published(stored: Tensors) -> Tensors:
        wide = ("A_log", "linear_attn.norm.weight")
        kept = {name: t if name.endswith(wide) else t.bfloat16() for name, t in stored.items()}
        return kept | {"mtp.fc.weight": torch.ones(3, 2), "mtp.layers.0.scale": torch.ones(2, dtype=torch.int8)}

    stock = filled(case)
    stock.save_pretrained(tmp_path / "theirs")
    other = respelt(tmp_path / "theirs", published)
    assert_round_trip(other, tmp_path / "native")
    origin = open_checkpoint(tmp_path / "native").origin
    assert origin is not None and {"mtp.fc.weight", "mtp.layers.0.scale"} <= set(origin.travelling)
    _, report = type(stock).from_pretrained(tmp_path / "native" / "stock", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_info_says_what_travels_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock = filled(named(qwen3_5.CASES, "untied"))
    stock.save_pretrained(tmp_path / "theirs")
    as_native(tmp_path / "theirs", tmp_path / "native")
    inside = sum(p.numel() for p in stock.model.language_model.parameters()) + stock.lm_head.weight.numel()
    beside = list(stock.model.visual.parameters())
    for name in ("theirs", "native"):
        assert main(["info", str(tmp_path / name), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == inside
        assert found["travelling"] == {"tensors": len(beside), "parameters": sum(p.numel() for p in beside)}
        assert main(["info", str(tmp_path / name)]) == 0
        assert f"in {len(beside)} tensors of parts that longrecall does not run" in capsys.readouterr().out


def read(raw: dict[str, Any]) -> Layout:
    return detect(raw, "config.json").layout(raw, "config.json")


TINY_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}


def test_older_keys_say_the_same_as_newer_ones() -> None:
    older = {
        **TINY_NEXT,
        "full_attention_interval": 2,
        "rope_theta": 1e7,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
    }
    newer = {
        **TINY_NEXT,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    }
    assert read(older).plain == read(newer).plain
    written, _ = stock_layout(detect(older, ""), read(older).plain, older)
    assert {key: written[key] for key in older} == older


def test_olmo_hybrid_without_positions_and_with_the_default_of_transformers() -> None:
    def shares(**changes: Any) -> set[float]:
        layers = read({"model_type": "olmo_hybrid", "num_hidden_layers": 4, **changes}).plain.layer_configs()
        return {getattr(layer.mixer, "rotary_share", 0.0) for layer in layers[3:]}

    assert shares(rope_parameters={"rope_theta": None}) == {0.0}
    # transformers 5.23 puts its default theta where there is nothing, and where there is null.
    assert shares() == shares(rope_parameters=None) == {1.0}


def test_the_whole_model_says_whether_the_head_is_tied() -> None:
    for outer, inner in ((True, False), (False, True)):
        raw = {
            "model_type": "qwen3_5",
            "tie_word_embeddings": outer,
            "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "tie_word_embeddings": inner},
        }
        assert read(raw).plain.tie_word_embeddings is outer


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen3_next", "hidden_act": "gelu"}, "\"hidden_act\" is 'gelu'"),
    ({"model_type": "qwen3_next", "use_sliding_window": True}, '"use_sliding_window" is True'),
    ({"model_type": "qwen3_next", "layer_types": ["mamba"] * 48}, '"layer_types" is'),
    ({"model_type": "qwen3_next", "mlp_only_layers": 3}, '"mlp_only_layers" is 3'),
    ({"model_type": "qwen3_next", "router_aux_loss_coef": -1}, '"router_aux_loss_coef" is -1'),
    ({"model_type": "qwen3_5_text", "attn_output_gate": False}, '"attn_output_gate" is False'),
    ({"model_type": "qwen3_5", "text_config": {"mlp_only_layers": [1]}}, '"text_config": "mlp_only_layers" is [1]'),
    ({"model_type": "qwen3_5", "text_config": {"new_key": 1}}, '"text_config": longrecall does not know the key'),
    ({"model_type": "qwen3_5", "new_key": 1}, 'does not know the key "new_key"'),
    ({"model_type": "qwen3_5", "text_config": 1}, '"text_config" is 1; it must be a mapping'),
    ({"model_type": "qwen3_5_moe", "norm_topk_prob": False}, '"norm_topk_prob" is False'),
    ({"model_type": "olmo_hybrid", "linear_use_gate": False}, '"linear_use_gate" is False'),
    ({"model_type": "olmo_hybrid", "num_hidden_layers": 1}, "wants layers of both kinds"),
    ({"model_type": "olmo_hybrid", "rope_parameters": {"rope_type": "spiral"}}, "spiral"),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_reproduced_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(json.loads(json.dumps(raw)))
    assert message in str(caught.value) and "\n" not in str(caught.value)
