"""fla-format checkpoints: logits against recorded vectors, configs against fla's rules, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.formats import FORMATS, detect
from longrecall.models.formats.fla_common import mlp_width
from longrecall.models.loading import load

VECTORS = Path(__file__).parent / "vectors"
CASES = sorted(path.name for path in VECTORS.iterdir())
FORMAT_OF = {
    "gla": "fla_gla",
    "retnet": "fla_retnet",
    "delta_net": "fla_delta_net",
    "gated_deltanet": "fla_gated_delta_net",
}


def layout_of(raw: dict[str, Any]) -> Any:
    return detect(raw, "config.json").layout(raw, "config.json")


def test_all_families_are_recorded() -> None:
    families = {json.loads((VECTORS / case / "config.json").read_text())["model_type"] for case in CASES}
    assert families == set(FORMAT_OF)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_flas(case: str) -> None:
    expected = load_file(VECTORS / case / "expected.safetensors")
    with torch.no_grad():
        logits = load(VECTORS / case)(expected["input_ids"]).logits
    # 1e-4 is the promised parity in float32. The logits have a standard deviation of about 1 (7 with a tied head), so
    # rounding over two layers and 37 tokens accounts for about 1e-5 of it.
    assert expected["logits"].std() > 0.5
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_converted_checkpoint_computes_the_same(case: str, tmp_path: Path) -> None:
    expected = load_file(VECTORS / case / "expected.safetensors")
    model = load(VECTORS / case)
    save(model, tmp_path / "native")
    again = load(tmp_path / "native")
    assert open_checkpoint(VECTORS / case).source_format == FORMAT_OF[model_type(case)]
    assert open_checkpoint(tmp_path / "native").source_format == "native"
    with torch.no_grad():
        assert torch.equal(again(expected["input_ids"]).logits, model(expected["input_ids"]).logits)


def model_type(case: str) -> str:
    return str(json.loads((VECTORS / case / "config.json").read_text())["model_type"])


def copy_case(case: str, folder: Path, change: dict[str, Any] | None = None, drop: str | None = None) -> Path:
    """A recorded case with config keys changed or a tensor left out."""
    raw = json.loads((VECTORS / case / "config.json").read_text()) | (change or {})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(VECTORS / case / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != drop}, folder / "model.safetensors")
    return folder


def test_gla_13b_sizes() -> None:
    # A config.json may leave out every default, so this is fla's 1.3B GLA.
    config = layout_of({"model_type": "gla"}).config
    mixer = config.layers[0]["mixer"]
    assert (mixer["num_heads"], mixer["key_dim"], mixer["value_dim"], config.layers[0]["mlp_size"]) == (
        4,
        256,
        512,
        5632,
    )
    assert (len(config.layers), config.vocab_size, config.norm_eps, mixer["norm_eps"]) == (24, 32000, 1e-6, 1e-6)
    assert config.state_size() == 12_582_912
    assert round(sum(math.prod(shape) for shape in config.tensor_shapes().values()) / 1e9, 4) == 1.3655


@pytest.mark.parametrize(
    ("kind", "layers", "mlp", "expected"),
    [
        ("retnet", 24, 2816, {"num_heads": 8, "key_dim": 256, "value_dim": 512, "output_gate": True}),
        (
            "delta_net",
            24,
            5632,
            {"num_heads": 16, "key_dim": 128, "value_dim": 128, "conv_width": 4, "output_gate": False},
        ),
        (
            "gated_deltanet",
            21,
            5632,
            {"num_heads": 6, "value_heads": 6, "key_dim": 256, "value_dim": 512, "conv_width": 4},
        ),
    ],
)
def test_defaults_of_the_other_families(kind: str, layers: int, mlp: int, expected: dict[str, Any]) -> None:
    config = layout_of({"model_type": kind}).config
    assert len(config.layers) == layers
    assert config.layers[0]["mlp_size"] == mlp
    assert {key: config.layers[0]["mixer"][key] for key in expected} == expected


@pytest.mark.parametrize(
    ("hidden", "ratio", "given", "width"),
    [(2048, 4, None, 5632), (2048, 2, None, 2816), (1024, None, None, 2816), (96, 4, None, 256), (96, 4, 100, 100)],
)
def test_mlp_width_rule(hidden: int, ratio: int | None, given: int | None, width: int) -> None:
    assert mlp_width(hidden, ratio, given) == width


def test_mlp_ratio_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="hidden_ratio"):
        layout_of({"model_type": "gla", "hidden_ratio": "wide"})


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gla", "feature_map", "relu"),
        ("gla", "clamp_min", -3.0),
        ("gla", "use_gk", False),
        ("gla", "use_gv", True),
        ("gla", "hidden_act", "gelu"),
        ("gla", "num_kv_heads", 3),
        ("gla", "attnres_block_size", 2),
        ("gla", "gate_low_rank_dim", 32),
        ("gla", "gate_logit_normalizer", 8),
        ("gla", "conv_bias", True),
        ("gla", "expand_k", 0.3),
        ("gla", "norm_eps", 0),
        ("gla", "num_hidden_layers", 0),
        ("gla", "tie_word_embeddings", "yes"),
        ("gla", "elementwise_affine", "no"),
        ("gla", "quantization_config", {"bits": 4}),
        ("gla", "attn", {"layers": [99], "num_heads": 4}),
        ("gla", "attn", {"layers": [1], "num_heads": 4, "qk_norm": True}),
        ("gla", "attn", {"layers": [1], "num_heads": 7}),
        ("gla", "attn", [3]),
        ("retnet", "feature_map", "elu"),
        ("retnet", "expand_k", 0.00390625),
        ("delta_net", "qk_norm", "sum"),
        ("delta_net", "qk_activation", "relu"),
        ("delta_net", "use_beta", False),
        ("delta_net", "use_output_norm", False),
        ("gated_deltanet", "output_gate_activation", "sigmoid"),
        ("gated_deltanet", "use_mamba_gate", False),
        ("gated_deltanet", "expand_v", 1.001),
        ("gated_deltanet", "num_v_heads", 5),
    ],
)
def test_what_cannot_be_reproduced_is_refused(kind: str, key: str, value: object) -> None:
    inner = "num_heads" if value == {"layers": [1], "num_heads": 7} else "value_heads" if key == "num_v_heads" else key
    with pytest.raises(UserError, match=inner):
        layout_of({"model_type": kind, key: value})


def test_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r'"num_head".*Did you mean "num_heads"'):
        layout_of({"model_type": "gla", "num_head": 8})


def test_unknown_key_that_is_off_passes() -> None:
    # Later versions of fla add options that are off; their files stay readable.
    assert layout_of({"model_type": "gla", "some_new_option": None, "another": False}).config.num_hidden_layers == 24


@pytest.mark.parametrize("case", ["gla_conv_shared", "delta_net_gated"])
def test_tied_head_may_be_stored_if_it_is_the_embedding(case: str, tmp_path: Path) -> None:
    folder = copy_case(case, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embeddings.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    model = load(folder)
    assert model.lm_head.weight is model.model.embeddings.weight
    head[0, 0] += 1
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r'"lm_head.weight" differs'):
        load(folder)


def test_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'"lm_head.weight" is missing'):
        open_checkpoint(copy_case("gla", tmp_path / "copy", drop="lm_head.weight"))


def test_stored_rotary_frequencies_are_skipped(tmp_path: Path) -> None:
    folder = copy_case("retnet", tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.attn.rotary.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    assert open_checkpoint(folder).source_format == "fla_retnet"


def test_shape_that_shared_heads_cannot_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"k_proj\.weight.*has shape"):
        open_checkpoint(copy_case("gla", tmp_path / "copy", change={"num_heads": 4, "num_kv_heads": 1}))


def test_norm_without_scale_has_the_dtype_of_the_model() -> None:
    checkpoint = open_checkpoint(VECTORS / "gla_hybrid")
    name = "model.layers.0.mixer.o_norm.weight"
    assert checkpoint.dtype(name) == torch.float32
    assert torch.equal(checkpoint.read(name), torch.ones(checkpoint.shape(name)))


def test_every_family_is_registered() -> None:
    assert {name: FORMATS[name].model_types for name in FORMAT_OF.values()} == {
        name: (kind,) for kind, name in FORMAT_OF.items()
    }
