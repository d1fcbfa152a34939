"""Mamba checkpoints of transformers and mamba_ssm: logits against transformers, configs, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import MambaConfig, MambaForCausalLM

from longrecall.errors import UserError
from longrecall.models.checkpoint import open_checkpoint, save
from longrecall.models.formats import detect
from longrecall.models.loading import load

VOCABULARY = 64
# 1e-4 is the promised parity in float32; logits have a standard deviation near 1, so rounding alone gives about 1e-6.
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


def reference(tied: bool = True, **options: Any) -> MambaForCausalLM:
    """A random transformers model in which D, A_log, dt and the biases differ per channel and decays are strong."""
    sizes = {"hidden_size": 40, "state_size": 5, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(**sizes | options, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "A_log" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "conv1d" in name or "embeddings" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            if name.endswith("dt_proj.bias"):
                # Time steps near 0.3 instead of 0.01: within 37 tokens both remembering and forgetting show.
                parameter.add_(3.0)
    return model


def tokens() -> torch.Tensor:
    # 37 is no multiple of any block of the scan.
    return torch.randint(0, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(0))


def assert_same_logits(model: MambaForCausalLM, folder: Path) -> None:
    x = tokens()
    with torch.no_grad():
        expected, got = model(x, use_cache=False).logits, load(folder)(x).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": True},
        {"use_conv_bias": False},
        {"conv_kernel": 3, "layer_norm_epsilon": 1e-3},
        {"expand": 3},
        {"time_step_rank": 7, "residual_in_fp32": False},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_logits_equal_transformers(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    model = reference(tied, **options)
    model.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).source_format == "transformers_mamba"
    assert_same_logits(model, tmp_path)


def test_logits_from_a_carried_state_equal_those_of_transformers(tmp_path: Path) -> None:
    model, x = reference(), tokens()
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        first = ours(x[:, :20])
        rest = ours(x[:, 20:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, **TOLERANCE)


def test_written_back_as_native_it_is_the_same_model(tmp_path: Path) -> None:
    model = reference()
    model.save_pretrained(tmp_path / "foreign")
    read = load(tmp_path / "foreign")
    save(read, tmp_path / "native")
    assert open_checkpoint(tmp_path / "native").source_format == "native"
    again = load(tmp_path / "native")
    assert again.fingerprint() == read.fingerprint()
    assert_same_logits(model, tmp_path / "native")


def mamba_ssm_folder(model: MambaForCausalLM, folder: Path, torch_file: bool, **ssm_cfg: Any) -> Path:
    """The same weights as mamba_ssm stores them: its names, its config, the head stored even when tied."""
    config = model.config
    written = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        # 61 tokens padded to a multiple of 16: the tensors have 64 rows.
        "vocab_size": 61,
        "ssm_cfg": {"d_state": config.state_size, **ssm_cfg},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": config.tie_word_embeddings,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {name.replace("embeddings", "embedding"): tensor.clone() for name, tensor in model.state_dict().items()}
    if torch_file:
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("torch_file", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ssm_cfg", [{}, {"layer": "Mamba1", "dt_rank": 3}], ids=["unnamed", "named"])
def test_mamba_ssm_layout(ssm_cfg: dict[str, Any], tied: bool, torch_file: bool, tmp_path: Path) -> None:
    model = reference(tied, time_step_rank=ssm_cfg.get("dt_rank", "auto"))
    folder = mamba_ssm_folder(model, tmp_path, torch_file, **ssm_cfg)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.source_format == "mamba_ssm"
    assert checkpoint.config.vocab_size == VOCABULARY
    assert_same_logits(model, folder)


def config_of(raw: dict[str, Any]) -> Any:
    return detect(raw, "config.json").layout(raw, "config.json").config


# What the published folders of Mamba 130m say, in either format.
PUBLISHED_SSM = {
    "d_model": 768,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
PUBLISHED_HF = {
    **{"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280, "state_size": 16},
    **{"intermediate_size": 1536, "d_inner": 1536, "d_model": 768, "n_layer": 24, "expand": 2, "conv_kernel": 4},
    **{"time_step_rank": 48, "time_step_init_scheme": "random", "time_step_scale": 1.0, "time_step_floor": 0.0001},
    **{"time_step_min": 0.001, "time_step_max": 0.1, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu"},
    **{"fused_add_norm": True, "rms_norm": True, "residual_in_fp32": True, "rescale_prenorm_residual": False},
    **{"layer_norm_epsilon": 1e-05, "pad_vocab_size_multiple": 8, "ssm_cfg": {}, "initializer_range": 0.1},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}


@pytest.mark.parametrize("raw", [PUBLISHED_SSM, PUBLISHED_HF], ids=["mamba_ssm", "transformers"])
def test_published_130m_sizes(raw: dict[str, Any]) -> None:
    config = config_of(raw)
    # 50280 * 768 for the tied embedding, 24 layers of 3,771,648 and the last norm.
    assert sum(math.prod(shape) for shape in config.tensor_shapes().values()) == 129_135_360
    assert config.state_size() == 24 * 1536 * 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "relu"),
        ("time_step_rank", 0),
        ("time_step_rank", "automatic"),
        ("use_bias", 1),
        ("state_size", 0),
        ("expand", "2"),
        ("use_bcdt_rms", True),
    ],
)
def test_transformers_config_that_cannot_be_reproduced(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        config_of({"model_type": "mamba", "num_hidden_layers": 1, key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("dt_rank", -1), ("dt_rank", "low"), ("conv_bias", 0), ("headdim", 64), ("layer", "Mamba3")]
)
def test_ssm_cfg_that_cannot_be_reproduced(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        config_of({"d_model": 64, "n_layer": 1, "ssm_cfg": {key: value}})
