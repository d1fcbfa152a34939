"""Parallel branches: the sum that the description says, and Falcon-H1's layer."""

from __future__ import annotations

import torch
from transformers.models.falcon_h1 import modeling_falcon_h1

from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.accounting import account, key_value_cache_size
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

ZERO = torch.zeros(2, dtype=torch.long)
WIDTH, LENGTH = 24, 23


def test_a_falcon_h1_layer_is_theirs() -> None:
    """Both branches, their factors and the norm before them; outputs near 1 in size, the promised parity in float32."""
    config = modeling_falcon_h1.FalconH1Config(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=6,
        mamba_chunk_size=8,
        ssm_multipliers=[0.5, 2.0, 0.7, 1.5, 0.3],
        attention_in_multiplier=0.6,
        attention_out_multiplier=1.7,
        ssm_in_multiplier=1.4,
        ssm_out_multiplier=0.8,
        intermediate_size=8,
    )
    config._attn_implementation = "eager"
    theirs = modeling_falcon_h1.FalconH1DecoderLayer(config, 0).eval()
    theirs.mamba.register_buffer("mup_vector", modeling_falcon_h1.compute_mup_vector(config), persistent=False)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        theirs.input_layernorm.weight.fill_(1.0)
        # Leaves what goes into the layer and the two branches.
        theirs.feed_forward.down_proj.weight.zero_()
    ours = mixer_config(
        {
            "type": "parallel",
            "attention": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 6},
            "ssm": {"type": "mamba2", "inner_dim": 32, "head_dim": 8, "state_dim": 6, "gated_norm": "none"}
            | {"part_multipliers": [0.5, 2.0, 0.7, 1.5, 0.3]},
            "attention_input_multiplier": 0.6,
            "attention_output_multiplier": 1.7,
            "ssm_input_multiplier": 1.4,
            "ssm_output_multiplier": 0.8,
        }
    ).build(WIDTH)
    tensors = {f"attention.{name}": tensor for name, tensor in theirs.self_attn.state_dict().items()}
    for name, tensor in theirs.mamba.state_dict().items():
        new = name.replace("conv1d", "conv")
        tensors[f"ssm.{new}"] = tensor.squeeze(1) if new == "conv.weight" else tensor
    ours.load_state_dict(tensors)

    x = torch.randn(2, LENGTH, WIDTH, generator=generator)
    position = torch.arange(LENGTH)[None]
    causal = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        rotary = modeling_falcon_h1.FalconH1RotaryEmbedding(config)(x, position)
        (expected,) = theirs(x, attention_mask=causal, position_embeddings=rotary)
        normed = theirs.input_layernorm(x)
        found, _ = ours(normed, None, mask=None, position=ZERO)
        first, state = ours(normed[:, :15], None, mask=None, position=ZERO)
        second, _ = ours(normed[:, 15:], state, mask=None, position=ZERO + 15)
    assert (expected - x).std() > 0.1
    torch.testing.assert_close(x + found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(x + torch.cat([first, second], 1), expected, rtol=0, atol=1e-4)


def test_accounts_and_states_find_the_branches() -> None:
    config = RecurrentConfig(vocab_size=40, hidden_size=32, layers=[{"mixer": MIXERS["parallel"], "mlp_size": 8}])
    (layer,) = account(config).layers
    inner = mixer_config(MIXERS["parallel"]["ssm"])
    assert layer.state_size == inner.state_size() == 4 * 4 * 16
    assert "attention num_heads=4" in layer.sizes and "+ mamba2" in layer.sizes
    assert key_value_cache_size(config, 100) == 2 * 2 * 8 * 100
    assert account(config).parameters == sum(p.numel() for p in RecurrentLM(config).parameters())
    assert set(RecurrentLM(config)(torch.arange(5)[None]).past_key_values.layers[0]) == {
        "attention.key",
        "attention.value",
        "attention.position",
        "ssm.recurrent",
        "ssm.conv",
    }
