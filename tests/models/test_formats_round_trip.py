"""Every format written back as it was read, and what a native checkpoint keeps for that on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM

import longrecall
from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.formats import FORMATS, transformers_mamba2
from longrecall.models.formats.format import Format
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.stock import stock_layout
from longrecall.models.sizes import PlainConfig
from tests.models.round_trip import as_native, assert_round_trip
from tests.models.test_formats_fla import CASES, VECTORS
from tests.models.test_formats_mamba2 import PADDED, mamba_ssm_folder, reference


@pytest.mark.parametrize("case", CASES)
def test_fla_checkpoints(case: str, tmp_path: Path) -> None:
    assert_round_trip(VECTORS / case, tmp_path / "native")


@pytest.mark.parametrize(
    ("groups", "tied", "options"),
    [
        (1, True, {"use_bias": True}),
        (2, False, {"use_conv_bias": False, "time_step_limit": (0.2, 0.6)}),
        (8, False, {"conv_kernel": 3, "layer_norm_epsilon": 1e-3, "dtype": torch.bfloat16}),
    ],
)
def test_transformers_mamba2(groups: int, tied: bool, options: dict[str, Any], tmp_path: Path) -> None:
    model = reference(groups, tied, **options)
    model.to(options.get("dtype", torch.float32)).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert_round_trip(tmp_path / "theirs", tmp_path / "native")


@pytest.mark.parametrize("options", [{}, {"time_step_rank": 5, "use_bias": True}, {"tie_word_embeddings": False}])
def test_transformers_mamba(options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "state_size": 6, "num_hidden_layers": 2}
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**sizes, **options)).save_pretrained(tmp_path / "theirs")
    assert_round_trip(tmp_path / "theirs", tmp_path / "native")


@pytest.mark.parametrize("torch_file", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_mamba_ssm(tied: bool, torch_file: bool, tmp_path: Path) -> None:
    folder = mamba_ssm_folder(reference(2, tied, vocabulary=PADDED), tmp_path / "theirs", torch_file)
    assert_round_trip(folder, tmp_path / "native")


def with_vision(layout: Layout) -> Layout:
    return Layout(layout.plain, layout.sources, layout.copies, travelling=("vision.", "mtp."))


@pytest.fixture
def travelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba-2 with a tower that only travels along."""
    form = Format(
        "transformers_mamba2",
        ("mamba2",),
        lambda raw, where: with_vision(transformers_mamba2.layout(raw, where)),
        transformers_mamba2.stock_config,
    )
    monkeypatch.setitem(FORMATS, "transformers_mamba2", form)


@pytest.mark.usefixtures("travelling")
def test_tensors_that_travel_along_survive_surgery(tmp_path: Path) -> None:
    reference(2).save_pretrained(tmp_path / "theirs")
    tower = {"vision.a": torch.arange(3), "vision.b": torch.ones(2, dtype=torch.bfloat16), "mtp.c": torch.ones(1)}
    save_file(load_file(tmp_path / "theirs" / "model.safetensors") | tower, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "preprocessor_config.json").write_text("{}")
    assert_round_trip(tmp_path / "theirs", tmp_path / "native")
    longrecall.expand(tmp_path / "theirs", tmp_path / "large", method="grow_state", layers="all", state_dim=12)
    longrecall.expand(tmp_path / "large", tmp_path / "larger", method="grow_state", layers="all", state_dim=16)
    large = open_checkpoint(tmp_path / "larger")
    origin = large.origin
    assert origin is not None and origin.format == "transformers_mamba2"
    assert set(origin.travelling) == set(tower)
    assert all(torch.equal(origin.read(name), tensor) for name, tensor in tower.items())
    assert origin.config == json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (tmp_path / "larger" / "preprocessor_config.json").is_file()
    # They are no part of the model, and are protected as its other files are.
    assert not any(name.startswith(("vision", "mtp")) for name in large.names())
    assert tmp_path / "larger" / "origin" / "model.safetensors" in large.files()
    raw, _ = stock_layout(FORMATS["transformers_mamba2"], large.plain, origin.config)
    assert raw == {**origin.config, "state_size": 16}


def test_without_the_format_the_same_tensors_are_unknown(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"vision.a": torch.ones(1)}, file)
    with pytest.raises(UserError, match=r'unknown tensors that config.json has no place for: "vision.a"'):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 1}, r"layer 1.mixer.state_dim is 9 here, and would be 6 in a model of"),
        ({"norm_eps": 1e-3}, r"layer 0.mixer.norm_eps is 1e-05 here, and would be 0.001 in a model of"),
    ],
)
def test_a_model_that_the_stock_one_cannot_be_says_where(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path / "theirs")
    plain = as_native(tmp_path / "theirs", tmp_path / "native").plain.to_dict()
    if "layers" in change:
        second = plain["layers"][1]
        plain["layers"] = [plain["layers"][0], {**second, "mixer": {**second["mixer"], "state_dim": 9}}]
    else:
        plain |= change
    with pytest.raises(UserError, match=said):
        stock_layout(FORMATS["transformers_mamba2"], PlainConfig.from_dict(plain), {})


def test_a_mixer_that_a_format_does_not_have(tmp_path: Path) -> None:
    plain = open_checkpoint(VECTORS / "gla").plain
    with pytest.raises(UserError, match=r'no layer of this model has a "mamba2" \(there are: gla, mlp\)'):
        stock_layout(FORMATS["transformers_mamba2"], plain, {})


@pytest.mark.parametrize("content", ["", "{}", '{"format": 3}', '{"format": "x", "spelt": [1]}'])
def test_damaged_origin_is_named(content: str, tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path / "theirs")
    as_native(tmp_path / "theirs", tmp_path / "native")
    (tmp_path / "native" / "origin" / "origin.json").write_text(content)
    with pytest.raises(UserError, match=r"origin\.json"):
        _ = open_checkpoint(tmp_path / "native").origin
