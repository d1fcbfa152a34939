"""Counting from the config alone: the published 1.3B models to the digit, and agreement with built models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.cli.info import as_text, describe
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.accounting import (
    account,
    average_key_value_cache_size,
    describe_sizes,
    equivalent_context,
    key_value_cache_size,
    retrieval_bytes,
    state_ratio,
    transformer_cache_size,
)
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

MAMBA2 = {"type": "mamba2", "inner_dim": 4096, "head_dim": 64, "state_dim": 128}
GLA = {"type": "gla", "num_heads": 4, "key_dim": 256, "value_dim": 512, "norm_eps": 1e-6}


MOE = {"type": "moe", "num_experts": 4, "top_k": 1, "inner_size": 8}


def mamba2_1b3(grown: range) -> RecurrentConfig:
    """state-spaces/mamba2-1.3b: 50277 tokens padded to a multiple of 16, tied."""
    layers = [{"mixer": MAMBA2 | ({"state_dim": 512} if index in grown else {})} for index in range(48)]
    return RecurrentConfig(vocab_size=50288, hidden_size=2048, layers=layers, tie_word_embeddings=True)


def gla_1b3(merged: range) -> RecurrentConfig:
    """fla-hub/gla-1.3B-100B: 32000 tokens, untied, SwiGLU of 5632."""
    layers = [{"mixer": GLA | {"merged": index in merged}, "mlp_size": 5632} for index in range(24)]
    return RecurrentConfig(vocab_size=32000, hidden_size=2048, layers=layers, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("grown", "parameters", "state"),
    [
        (range(0), 1_343_757_312, 25_165_824),
        (range(0, 48, 12), 1_350_064_128, 31_457_280),
        (range(0, 48, 6), 1_356_370_944, 37_748_736),
    ],
)
def test_mamba2_1b3(grown: range, parameters: int, state: int) -> None:
    counted = account(mamba2_1b3(grown))
    assert (counted.parameters, counted.state_size) == (parameters, state)
    assert counted.state_bytes == 4 * state


def test_one_grown_layer_of_mamba2_1b3_adds_what_the_facts_say() -> None:
    before, after = account(mamba2_1b3(range(0))), account(mamba2_1b3(range(1)))
    assert after.layers[0].parameters - before.layers[0].parameters == 1_576_704
    assert after.layers[1:] == before.layers[1:]


def test_gla_1b3() -> None:
    before, after = account(gla_1b3(range(0))), account(gla_1b3(range(0, 24, 6)))
    assert (before.state_size, after.state_size) == (12_582_912, 18_874_368)
    # The facts give 1.3655B; to the digit it is embeddings, head, 24 blocks and norms of the untied model.
    assert before.parameters == 1_365_514_240
    assert after.parameters - before.parameters == 4 * 4 * 4, "merging costs one H x H matrix a layer"


TINY = {
    "mamba2": {"type": "mamba2", "inner_dim": 32, "head_dim": 8, "state_dim": 4},
    "gla": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 8, "conv_width": 3},
    "merged": {"type": "retnet", "num_heads": 2, "key_dim": 4, "value_dim": 8, "merged": True},
    "delta": {"type": "gated_delta_net", "num_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 8},
    "attention": {"type": "attention", "num_heads": 4, "kv_heads": 2, "head_dim": 4, "window": 10},
}
TINY["handover"] = {"type": "handover", "old": TINY["gla"], "new": TINY["gla"] | {"num_heads": 1, "key_dim": 8}}


@settings(max_examples=12, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(TINY)), min_size=1, max_size=4),
    mlp_size=st.sampled_from([0, 24]),
    tied=st.booleans(),
)
def test_agrees_with_the_built_model(kinds: list[str], mlp_size: int, tied: bool) -> None:
    layers = [{"mixer": TINY[kind], "mlp_size": mlp_size} for kind in kinds]
    config = RecurrentConfig(vocab_size=32, hidden_size=16, layers=layers, tie_word_embeddings=tied)
    model = RecurrentLM(config)
    counted = account(config)
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    for index, layer in enumerate(model.model.layers):
        assert counted.layers[index].parameters == sum(parameter.numel() for parameter in layer.parameters())
    state = model.zero_state(1)
    held = sum(t.numel() for layer in state.layers for name, t in layer.items() if name.endswith("recurrent"))
    assert counted.state_size == held == sum(layer.state_size for layer in counted.layers)


def test_key_value_cache_counts_attention_layers_up_to_their_window() -> None:
    full = TINY["attention"] | {"window": None}
    layers = [{"mixer": TINY["attention"]}, {"mixer": full}, {"mixer": TINY["gla"]}]
    config = RecurrentConfig(vocab_size=32, hidden_size=16, layers=layers)
    assert key_value_cache_size(config, 5) == 2 * (2 * 2 * 4 * 5)
    assert key_value_cache_size(config, 100) == 2 * 2 * 4 * (10 + 100)


@pytest.mark.parametrize("window", [None, 1, 7, 40, 41])
def test_the_average_cache_is_the_mean_over_the_context(window: int | None) -> None:
    layer = {"mixer": TINY["attention"] | {"window": window}}
    config = RecurrentConfig(vocab_size=32, hidden_size=16, layers=[layer, {"mixer": TINY["gla"]}])
    steps = 40_000
    # The integral of min(t, W) over 0..40 by the midpoint rule: exact but for the step with the corner.
    held = [min((i + 0.5) * 40 / steps, window or 40) for i in range(steps)]
    assert average_key_value_cache_size(config, 40) == pytest.approx(2 * 2 * 4 * sum(held) / steps, rel=1e-6)
    assert average_key_value_cache_size(config, 0) == 0


def test_equations_of_the_paper() -> None:
    # Section 3.1: with d_qk = d_v = d the ratio is L / d; "for d = 128 and L = 2048, the ratio is 16".
    delta = {"type": "gated_delta_net", "num_heads": 8, "key_dim": 128, "value_dim": 128}
    attention = {"type": "attention", "num_heads": 8, "head_dim": 128}
    config = RecurrentConfig(vocab_size=32, hidden_size=1024, layers=[{"mixer": delta}] * 2)
    transformer = RecurrentConfig(vocab_size=32, hidden_size=1024, layers=[{"mixer": attention}] * 2)
    assert state_ratio(config, 2048) == 16.0 and config.state_size() == 2 * 8 * 128 * 128
    assert transformer_cache_size(config, 2048) == key_value_cache_size(transformer, 2048)
    assert average_key_value_cache_size(transformer, 2048) == 2 * 2048 * 8 * (128 + 128) / 2
    assert state_ratio(transformer, 2048) is None


@pytest.mark.parametrize("name", MIXERS)
def test_the_state_of_every_mixer(name: str) -> None:
    config = RecurrentConfig(hidden_size=32, layers=[{"mixer": MIXERS[name]}])
    with torch.no_grad():
        (layer,) = RecurrentLM(config)(torch.arange(5)[None]).past_key_values.layers
    held = sum(tensor.numel() for key, tensor in layer.items() if key.endswith("recurrent"))
    assert account(config).state_size == held and (held > 0) != name.startswith(
        ("attention", "mla", "base_conv", "hyena")
    )


def test_state_of_mamba2_1b3_in_tokens_of_a_transformer() -> None:
    # 25,165,824 float32 numbers are 100,663,296 bytes; a 48-layer Transformer caches 2 * 2 * 2048 * 48 bytes a token.
    config = mamba2_1b3(range(0))
    assert equivalent_context(config, account(config).state_size) == 100_663_296 / 393_216


def test_sizes_as_one_line() -> None:
    config = RecurrentConfig(vocab_size=32, hidden_size=16, layers=[{"mixer": TINY["merged"], "mlp_size": 24}])
    assert account(config).layers[0].sizes == "num_heads=2 key_dim=4 value_dim=8 merged mlp=24"
    expanded = TINY["gla"] | {"expansion": {"kind": "headwise", "factor": 2, "subheads": False}}
    config = RecurrentConfig(vocab_size=32, hidden_size=16, layers=[{"mixer": expanded}])
    sizes = "num_heads=2 key_dim=4 value_dim=8 conv_width=3 expansion=headwise:2 subheads=no"
    assert account(config).layers[0].sizes == sizes
    handover = RecurrentConfig(vocab_size=32, hidden_size=16, layers=[{"mixer": TINY["handover"]}]).layers[0]["mixer"]
    assert describe_sizes(handover) == ("gla num_heads=2 key_dim=4 value_dim=8 conv_width=3 -> num_heads=1 key_dim=8")


def test_the_model_card_counts_as_accounting_does(tmp_path: Path) -> None:
    handover = {"type": "handover", "old": MIXERS["gla"], "new": MIXERS["retnet"]}
    model = RecurrentLM(RecurrentConfig(hidden_size=32, layers=[{"mixer": handover, "mlp_size": 16}]))
    save(model, tmp_path / "saved")
    parameters = account(model.config).parameters
    assert parameters == sum(parameter.numel() for parameter in model.parameters())
    assert f"| parameters | {parameters:,} (float32) |" in (tmp_path / "saved" / "README.md").read_text(
        encoding="utf-8"
    )


def test_retrieval_keeps_the_ids_once_and_a_vector_a_finished_chunk_and_layer() -> None:
    layer = {"type": "retrieval", "base": TINY["attention"], "chunk": 64, "encoder_dim": 64}
    inside = {"type": "handover", "old": layer | {"chunk": 8, "encoder_dim": 5}, "new": TINY["gla"]}
    plain = RecurrentConfig(vocab_size=32, hidden_size=16, layers=[{"mixer": TINY["gla"]}])
    assert retrieval_bytes(plain, 1000) == 0
    config = RecurrentConfig(vocab_size=32, hidden_size=16, layers=[{"mixer": layer}] * 2 + [{"mixer": inside}])
    ids, vectors = 4 * 1000, 2 * (2 * 64 * (1000 // 64) + 5 * (1000 // 8))
    assert retrieval_bytes(config, 1000) == ids + vectors
    assert key_value_cache_size(config, 1000) == 3 * key_value_cache_size(
        RecurrentConfig(vocab_size=32, hidden_size=16, layers=[{"mixer": TINY["attention"]}]), 1000
    )
    with torch.no_grad():
        state = RecurrentLM(config)(torch.ones(1, 1000, dtype=torch.long)).past_key_values
    held = [t for x in state.layers for name, t in x.items() if name.rpartition(".")[2] == "chunk"]
    # The weights are float32 here, and the 16 bits of serving are counted.
    assert retrieval_bytes(config, 1000) == 4 * state.context.numel() + 2 * sum(t.numel() for t in held)
    assert account(config).layers[0].sizes == (
        "attention num_heads=4 kv_heads=2 head_dim=4 window=10"
        " + weighted chunk=64 top_k=4 encoder_dim=64 num_heads=8 kv_heads=1 head_dim=64 blend=fixed"
    )


def test_active_parameters_leave_out_the_experts_that_a_token_is_not_sent_to() -> None:
    moe = {"type": "moe", "num_experts": 128, "top_k": 6, "inner_size": 1856, "gated": False, "activation": "relu2"}
    moe |= {"router": "sigmoid", "correction_bias": True, "shared_size": 3712}
    mom = {"type": "mom", "num_heads": 2, "key_dim": 8, "value_dim": 16, "memories": 4, "active": 1}
    for mixers, idle in (
        # Nemotron-3-Nano's sizes: 122 experts of two matrices each, in two layers.
        ([moe, MAMBA2, moe], 2 * 122 * 2 * 1856 * 2688),
        ([MAMBA2], 0),
        # Three memories' rows of keys, values, two gates, convolutions, A_log and dt_bias.
        ([mom], 3 * ((16 + 32 + 2 + 2) * 2688 + (16 + 32) * 4 + 2 * 2)),
    ):
        layers = [{"mixer": mixer} for mixer in mixers]
        layers += [{"blocks": [{"name": "mixer", "module": MAMBA2}, {"name": "mlp", "module": MOE}]}] * bool(idle)
        idle += 3 * 3 * 8 * 2688 * bool(idle)
        config = RecurrentConfig(vocab_size=32, hidden_size=2688, layers=layers)
        counted = account(config)
        assert counted.parameters - counted.active_parameters == idle
        facts = describe(config, (), "x", None)
        assert facts["active_parameters"] == counted.active_parameters
        assert ("active parameters" in as_text(facts)) == bool(idle)
        assert not idle or "conv_width=4 + moe num_experts=4 top_k=1 inner_size=8" in as_text(facts)
    assert describe_sizes(mixer_config(moe).to_dict()) == "num_experts=128 top_k=6 inner_size=1856 shared_size=3712"
