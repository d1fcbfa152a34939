"""What transformers and Accelerate read to refuse what a recurrence cannot do; packed and padded batches of hybrids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import big_modeling
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

import longrecall
from longrecall.errors import UserError
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS
from tests.hybrids import HYBRIDS, LAYER_TYPES, hybrid, hybrid_config, save_hybrid

EVERY = pytest.mark.parametrize("name", HYBRIDS)


@EVERY
def test_layer_types_have_transformers_names(name: str, tmp_path: Path) -> None:
    config = hybrid_config(name)
    assert config.layer_types == LAYER_TYPES[name]
    assert set(config.layer_types) <= set(ALLOWED_LAYER_TYPES)
    config.validate_layer_type()
    # What follows from the layers is no second place for them, and old files stay as they are.
    config.save_pretrained(tmp_path)
    assert "layer_types" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoConfig.from_pretrained(tmp_path).layer_types == LAYER_TYPES[name]


def test_layer_types_of_every_mixer() -> None:
    """Whatever keeps more than the caches of attention counts as a recurrence: sharding tokens is wrong for it."""
    config = RecurrentConfig(hidden_size=32, layers=[{"mixer": mixer, "mlp_size": 0} for mixer in MIXERS.values()])
    found = dict(zip(MIXERS, config.layer_types, strict=True))
    attention = {name: kind for name, kind in found.items() if kind != "linear_attention"}
    windows = ("attention_meta", "attention_window")
    assert attention == {
        **dict.fromkeys(("attention", "attention_options", "mla"), "full_attention"),
        **dict.fromkeys(windows, "sliding_attention"),
    }


@EVERY
def test_sharded_sequences_are_refused(name: str) -> None:
    model = hybrid(name)
    assert not getattr(model, "supports_context_parallel", False)
    for check in ("_refuse_recurrent_layers_under_sequence_parallelism", "_attach_context_parallel_hooks"):
        # Older versions have no such check.
        if (found := getattr(big_modeling, check, None)) is not None:
            with pytest.raises(ValueError, match="linear_attention"):
                found(model)


def test_trainer_refuses_context_parallelism() -> None:
    from transformers import Trainer

    parallel = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallel))
    for model in (hybrid("qwen"), RecurrentLM(RecurrentConfig(layers=[{"mixer": MIXERS["attention"]}]))):
        with pytest.raises(ValueError, match="Context parallelism is supported only with"):
            Trainer._prepare_context_parallel_inputs(trainer, model, {"input_ids": torch.ones(1, 4)})


@pytest.mark.parametrize("wanted", ["flash_attention_2", "sdpa", "flex_attention"])
def test_other_attention_implementations_are_refused(wanted: str, tmp_path: Path) -> None:
    folder = save_hybrid("qwen", tmp_path / "model")
    with pytest.raises((ValueError, ImportError), match="support"):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=wanted)


@EVERY
def test_nothing_is_taken_back(name: str) -> None:
    model = hybrid(name)
    ids = torch.arange(6)[None]
    state = model(ids).past_key_values
    assert not state.is_croppable and not state.is_compileable
    with pytest.raises(UserError, match="cannot be cropped"):
        state.crop(-2)
    for options in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": hybrid(name)}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(ids, max_new_tokens=3, **options)


def documents(lengths: tuple[int, ...] = (3, 1, 9, 14)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 256, (length,), generator=generator) for length in lengths]


@EVERY
@torch.no_grad()
def test_batches_of_padding_free_collators(name: str) -> None:
    """Each of the ways in which transformers' collator says where a text begins; one token is a text too."""
    model, texts = hybrid(name), documents()
    alone = torch.cat([model(text[None]).logits[0] for text in texts])
    rows = [{"input_ids": text.tolist()} for text in texts]
    for said in (
        {},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    ):
        batch = DataCollatorWithFlattening(return_tensors="pt", **said)(rows)
        out = model(**batch)
        # float32; sums in another order.
        torch.testing.assert_close(out.logits[0], alone, rtol=1e-4, atol=1e-4)
        assert torch.isfinite(out.loss)


@EVERY
@torch.no_grad()
def test_left_padding_of_one_row_and_of_several(name: str) -> None:
    model, (text, other) = hybrid(name), documents()[2:]
    alone, state = model(text[None]).logits, model(text[None]).past_key_values
    for rows in (1, 2):
        ids, mask = torch.zeros(rows, 14, dtype=torch.long), torch.zeros(rows, 14, dtype=torch.long)
        ids[0, -len(text) :], mask[0, -len(text) :] = text, 1
        ids[1:], mask[1:] = other, 1
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        for more in ({}, {"position_ids": places}):
            out = model(ids, attention_mask=mask, **more)
            torch.testing.assert_close(out.logits[:1, -len(text) :], alone, rtol=1e-4, atol=1e-4)
            for found, expected in zip(out.past_key_values.layers, state.layers, strict=True):
                for key in expected.keys() & {"recurrent", "conv", "shift", "ssm.recurrent", "mlp.shift"}:
                    torch.testing.assert_close(found[key][:1], expected[key], rtol=1e-4, atol=1e-4)
        greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        said = model.generate(ids, attention_mask=mask, **greedy)[:1, 14:]
        assert torch.equal(said, model.generate(text[None], **greedy)[:, len(text) :])


def test_what_follows_from_the_layers_may_stand_in_a_file_if_it_is_true(tmp_path: Path) -> None:
    folder = save_hybrid("qwen", tmp_path / "model")
    stored = json.loads((folder / "config.json").read_text())
    true = {"num_hidden_layers": 3, "layer_types": LAYER_TYPES["qwen"]}
    (folder / "config.json").write_text(json.dumps(stored | true))
    found = longrecall.load(folder).config
    assert found.layers == stored["layers"] and not set(true) & set(found.to_dict())
    for key, value in {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 3}.items():
        (folder / "config.json").write_text(json.dumps(stored | true | {key: value}))
        with pytest.raises(UserError, match=f'"{key}" contradicts "layers"'):
            longrecall.load(folder)
