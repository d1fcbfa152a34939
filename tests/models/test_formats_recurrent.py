"""RecurrentGemma, RWKV, HGRN2, KDA, MoM and Gated DeltaProduct: what is refused, and how older files say the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import longrecall
from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.formats import detect
from longrecall.models.formats.recurrent_gemma import in_bfloat16
from longrecall.models.formats.stock import stock_layout
from tests.models.families import recurrent_gemma
from tests.models.families.case import filled
from tests.models.naive import kda
from tests.models.round_trip import assert_round_trip
from tests.models.test_families import ids


def layout_of(kind: str, **keys: Any) -> Any:
    raw = {"model_type": kind, **keys}
    return detect(raw, "config.json").layout(raw, "config.json")


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("recurrent_gemma", "block_types", ["recurrent", "mlp"]),
        ("recurrent_gemma", "_block_types", ["recurrent"]),
        ("recurrent_gemma", "hidden_activation", "relu"),
        ("recurrent_gemma", "embeddings_scale_by_sqrt_dim", False),
        ("recurrent_gemma", "lru_width", 2563),
        ("recurrent_gemma", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        ("recurrent_gemma", "logits_soft_cap", 0),
        ("recurrent_gemma", "use_mamba", True),
        ("rwkv", "rescale_every", 0.5),
        ("rwkv", "rescale_every", 1),
        ("rwkv", "layer_norm_epsilon", 0),
        ("rwkv", "attention_dim", 7),
        ("rwkv7", "hidden_act", "relu"),
        ("rwkv7", "value_dim", [2048] * 23 + [4096]),
        ("rwkv7", "value_dim", 2050),
        ("rwkv7", "head_dim", 100),
        ("rwkv7", "hidden_ratio", "wide"),
        ("rwkv7", "attn", {"layers": [0], "num_heads": 4}),
        ("rwkv6", "hidden_act", "relu"),
        ("rwkv6", "expand_k", 0.3),
        ("hgrn2", "attnres_block_size", 2),
        ("hgrn2", "expand_ratio", 3000),
        ("hgrn2", "expand_ratio", 100),
        ("kda", "lower_bound", 5),
        ("kda", "expand_v", 1.001),
        ("kda", "attnres_block_size", 1),
        ("mom", "mom_backend", "gla"),
        ("mom", "use_short_conv", False),
        ("mom", "topk", 5),
        ("mom", "aux_loss_scale", -1),
        ("mom", "attn", {"layers": [0], "num_heads": 4, "qkv_bias": True}),
        ("gated_deltaproduct", "num_v_heads", 12),
        ("gated_deltaproduct", "num_householder", 0),
    ],
)
def test_what_cannot_be_reproduced_is_refused(kind: str, key: str, value: object) -> None:
    with pytest.raises(UserError, match=f'"{key}"'):
        layout_of(kind, **{key: value})


@pytest.mark.parametrize("kind", ["rwkv7", "rwkv6", "hgrn2", "kda", "mom", "gated_deltaproduct", "rwkv"])
def test_defaults_are_those_of_the_class(kind: str) -> None:
    # The published small models of these families have 1.3 to 1.6 billion parameters; transformers' RWKV-4 has 7.
    plan = layout_of(kind).plan(())
    count = sum(torch.Size(shape).numel() for shape in plan.shapes.values())
    assert 7e9 < count < 7.5e9 if kind == "rwkv" else 1.3e9 < count < 1.65e9
    assert count == sum(torch.Size(shape).numel() for shape in plan.foreign.values())


def test_the_factor_of_embeddings_is_rounded_as_the_class_does() -> None:
    for width in (32, 40, 2560, 4096, 1, 77, 12345):
        assert in_bfloat16(width**0.5) == float(torch.tensor(width**0.5, dtype=torch.bfloat16))


def test_a_config_of_the_published_recurrent_gemma_says_the_same(tmp_path: Path) -> None:
    stock = filled(recurrent_gemma.CASES[0])
    stock.save_pretrained(tmp_path / "stock")
    expected = longrecall.load(tmp_path / "stock")(ids()).logits
    file = tmp_path / "stock" / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.5, "embeddings_scale_by_sqrt_dim": True}
    raw["_block_types"] = raw.pop("block_types")
    del raw["tie_word_embeddings"]
    file.write_text(json.dumps(raw))
    assert torch.equal(longrecall.load(tmp_path / "stock")(ids()).logits, expected)
    assert_round_trip(tmp_path / "stock", tmp_path / "native")


@torch.no_grad()
def test_older_kda_files_have_rates_in_four_dimensions(tmp_path: Path) -> None:
    case = kda.CASES[1]
    case.write(tmp_path / "now", ids())
    tensors = load_file(tmp_path / "now" / "model.safetensors")
    heads = case.config["num_v_heads"]
    older = {name: t.view(1, 1, heads, 1) if name.endswith("A_log") else t for name, t in tensors.items()}
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "config.json").write_text(json.dumps(case.config))
    save_file(older, tmp_path / "older" / "model.safetensors")
    now, then = (longrecall.load(tmp_path / name)(ids()).logits for name in ("now", "older"))
    assert torch.equal(now, then)
    # A shape that is neither is named.
    name = "model.layers.0.attn.A_log"
    save_file(older | {name: torch.zeros(heads, 1)}, tmp_path / "older" / "model.safetensors")
    with pytest.raises(UserError, match=rf'"{name}" has shape \[4, 1\]'):
        open_checkpoint(tmp_path / "older")


def test_a_model_that_no_file_of_fla_can_be_is_named() -> None:
    raw = {"model_type": "hgrn2", "hidden_size": 24, "expand_ratio": 8, "num_hidden_layers": 2}
    form = detect(raw, "config.json")
    plain = form.layout(raw, "config.json").plain
    plain.layers[1]["mixer"]["key_dim"] = 4
    with pytest.raises(UserError, match=r"layer 1.*key_dim is 4 here"):
        stock_layout(form, plain, raw)


def test_naive_models_are_of_every_format() -> None:
    names = ("rwkv7", "rwkv6", "hgrn2", "kda", "mom", "gated_deltaproduct")
    for name in names:
        cases = importlib.import_module(f"tests.models.naive.{name}").CASES
        assert len(cases) >= 3 and {case.format for case in cases} == {f"fla_{name}"}
