"""Mamba-2 checkpoints of transformers and mamba_ssm: logits against transformers, configs, refusals."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.formats import detect
from longrecall.models.loading import load

VOCABULARY, PADDED = 61, 64
# 1e-4 is the promised parity in float32; logits have a standard deviation near 1, so rounding alone gives about 1e-6.
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


def reference(groups: int = 1, tied: bool = False, vocabulary: int = VOCABULARY, **options: Any) -> Mamba2ForCausalLM:
    """A random transformers model in which biases, A_log and dt differ per channel and the gate is not a constant."""
    sizes = {
        "num_heads": 8,
        "head_dim": 8,
        "hidden_size": 32,
        "state_size": 6,
        "num_hidden_layers": 2,
        "chunk_size": 16,
    }
    if groups > 1 and "group_size" not in inspect.signature(MambaRMSNormGated.__init__).parameters:
        pytest.skip("this transformers normalises all groups together, unlike mamba_ssm; later versions do not")
    config = Mamba2Config(**(sizes | options), vocab_size=vocabulary, n_groups=groups, tie_word_embeddings=tied)
    torch.manual_seed(groups)
    model = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "conv1d" in name or "embeddings" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


def tokens(vocabulary: int = VOCABULARY) -> torch.Tensor:
    # 37 is no multiple of any chunk length in use.
    return torch.randint(0, vocabulary, (2, 37), generator=torch.Generator().manual_seed(0))


def assert_same_logits(model: Mamba2ForCausalLM, folder: Path) -> None:
    x = tokens()
    with torch.no_grad():
        expected, got = model(x, use_cache=False).logits, load(folder)(x).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_logits_equal_transformers(groups: int, tied: bool, tmp_path: Path) -> None:
    model = reference(groups, tied)
    model.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).source_format == "transformers_mamba2"
    assert_same_logits(model, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": True},
        {"use_conv_bias": False},
        {"time_step_limit": (0.2, 0.6)},
        {"conv_kernel": 3, "layer_norm_epsilon": 1e-3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_reach_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    model = reference(2, **options)
    model.save_pretrained(tmp_path)
    assert_same_logits(model, tmp_path)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = reference(2)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_logits(model, tmp_path)


def mamba_ssm_folder(model: Mamba2ForCausalLM, folder: Path, torch_file: bool, vocabulary: int = VOCABULARY) -> Path:
    """The same weights as mamba_ssm stores them: its names, its config, the head stored even when tied."""
    config = model.config
    tied = config.tie_word_embeddings
    written = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "d_intermediate": 0,
        "vocab_size": vocabulary,
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": config.state_size,
            "headdim": config.head_dim,
            "ngroups": config.n_groups,
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": tied,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {name.replace("embeddings", "embedding"): tensor.clone() for name, tensor in model.state_dict().items()}
    if torch_file:
        if tied:
            tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("torch_file", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_ssm_layout(groups: int, tied: bool, torch_file: bool, tmp_path: Path) -> None:
    # 61 tokens padded to a multiple of 16: the tensors have 64 rows.
    model = reference(groups, tied, vocabulary=PADDED)
    folder = mamba_ssm_folder(model, tmp_path, torch_file)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.source_format == "mamba_ssm"
    assert checkpoint.config.vocab_size == PADDED
    assert_same_logits(model, folder)


def test_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    folder = mamba_ssm_folder(reference(vocabulary=PADDED), tmp_path, torch_file=True)
    torch.save({"backbone.embedding.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        open_checkpoint(folder)
    assert not (tmp_path / "executed").exists()


def test_truncated_torch_file_is_named(tmp_path: Path) -> None:
    folder = mamba_ssm_folder(reference(vocabulary=PADDED), tmp_path, torch_file=True)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"pytorch_model\.bin is truncated"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "content", [[torch.ones(2)], {"a": 3}, {"backbone.embedding.weight": torch.ones(2, dtype=torch.int8)}]
)
def test_torch_file_of_something_else_is_refused(content: object, tmp_path: Path) -> None:
    folder = mamba_ssm_folder(reference(vocabulary=PADDED), tmp_path, torch_file=True)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    changed = {**tensors, **content} if isinstance(content, dict) and "a" not in content else content
    torch.save(changed, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin|backbone\.embedding"):
        open_checkpoint(folder)


def test_torch_file_is_not_read_for_other_formats(tmp_path: Path) -> None:
    model = reference()
    model.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="never pickle"):
        open_checkpoint(tmp_path)


def config_of(raw: dict[str, Any]) -> Any:
    return detect(raw, "config.json").layout(raw, "config.json").config


def test_published_13b_sizes() -> None:
    raw = {
        "d_model": 2048,
        "n_layer": 48,
        "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"},
        "pad_vocab_size_multiple": 16,
    }
    config = config_of(raw)
    assert sum(math.prod(shape) for shape in config.tensor_shapes().values()) == 1_343_757_312
    assert config.state_size() == 25_165_824


@pytest.mark.parametrize("high", [math.inf, {"__float__": "Infinity"}, 1e18, 1e30, 10**400])
def test_infinite_time_step_limit(high: object) -> None:
    raw = {"model_type": "mamba2", "num_hidden_layers": 1, "time_step_limit": [0.0, high]}
    assert config_of(raw).layers[0]["mixer"]["time_step_limit"][1] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "relu"),
        ("num_heads", 3),
        ("time_step_limit", [1.0, 0.5]),
        ("time_step_limit", "none"),
        ("use_bias", 1),
        ("layer_norm_epsilon", -1.0),
        ("n_groups", 0),
        ("n_groups", 3),
        ("state_size", "128"),
        ("quantization_config", {"bits": 8}),
    ],
)
def test_transformers_config_that_cannot_be_reproduced(key: str, value: object) -> None:
    named = {"num_heads": "expand", "n_groups": "groups"}.get(key, key)
    with pytest.raises(UserError, match=named):
        config_of({"model_type": "mamba2", "num_hidden_layers": 1, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer", "Mamba3"),
        ("d_ssm", 1024),
        ("D_has_hdim", True),
        ("rmsnorm", False),
        ("norm_before_gate", True),
        ("headdim", 0),
        ("dt_limit", [0.1]),
        ("new_option", 3),
    ],
)
def test_ssm_cfg_that_cannot_be_reproduced(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        config_of({"d_model": 2048, "n_layer": 1, "ssm_cfg": {"layer": "Mamba2", key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_intermediate", 512),
        ("attn_layer_idx", [3]),
        ("rms_norm", False),
        ("ssm_cfg", None),
        ("n_layer", -1),
        ("residual_in_fp32", "yes"),
    ],
)
def test_mamba_ssm_config_that_cannot_be_reproduced(key: str, value: object) -> None:
    raw = {"d_model": 64, "n_layer": 1, "ssm_cfg": {"layer": "Mamba2"}, key: value}
    with pytest.raises(UserError, match=key):
        config_of(raw)
