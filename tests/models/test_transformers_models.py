"""transformers' ways of loading, changing, saving and asking a model, as its users call them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

from longrecall import RecurrentLM, load
from longrecall.models.byte_tokenizer import byte_tokenizer
from tests.conftest import MIXERS
from tests.models.test_transformers_trainer import model_of

PLAIN: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False}


def ids(rows: int = 2, columns: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def every_mixer() -> RecurrentLM:
    return model_of(*MIXERS, initializer_range=0.02).eval()


@pytest.fixture(scope="module")
def checkpoint(every_mixer: RecurrentLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    every_mixer.save_pretrained(folder, max_shard_size="300KB")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", [{}, {"dtype": "auto"}, {"device_map": "cpu"}, {"device_map": "auto"}], ids=str)
def test_every_mixer_comes_back_from_shards(checkpoint: Path, every_mixer: RecurrentLM, how: dict[str, str]) -> None:
    assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(checkpoint, **how).fingerprint() == every_mixer.fingerprint()


def test_other_ways_in(checkpoint: Path, every_mixer: RecurrentLM) -> None:
    assert load(checkpoint).fingerprint() == every_mixer.fingerprint()
    assert AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).dtype == torch.bfloat16
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    assert isinstance(made, RecurrentLM)
    assert made.num_parameters() == every_mixer.num_parameters() == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [300, 200])
def test_another_number_of_tokens(tied: bool, size: int, tmp_path: Path) -> None:
    model, x = model_of("gla", "retrieval", tie_word_embeddings=tied).eval(), ids().clamp(max=199)
    with torch.no_grad():
        before = model(x).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        after = model(x).logits
    least = min(size, before.shape[-1])
    assert after.shape[-1] == model.config.vocab_size == size
    assert torch.equal(after[..., :least], before[..., :least])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    assert load(tmp_path).fingerprint() == model.fingerprint()
    model.train()(x, labels=x).loss.backward()
    assert model.get_input_embeddings().weight.grad.shape[0] == size


def test_a_tuple_where_no_dictionary_is_wanted() -> None:
    model = model_of("gla").eval()
    loss, logits, state = model(ids(), labels=ids(), return_dict=False)
    assert loss.ndim == 0 and logits.shape == (2, 12, 258) and state.length == 12
    (logits,) = model(ids(), return_dict=False, use_cache=False)


def test_caches_of_others_are_refused() -> None:
    model = model_of("gla").eval()
    message = "past_key_values must be a RecurrentState, as a forward pass returns it; got DynamicCache"
    with pytest.raises(ValueError, match=message):
        model(ids(), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=message):
        model.generate(ids(), past_key_values=DynamicCache(), **PLAIN)


def test_ways_of_generating() -> None:
    model, x = model_of("gla_conv", "mamba2", "attention").eval(), ids()
    greedy = model.generate(x, **PLAIN)
    assert model.generate(x, **PLAIN, num_beams=3, num_return_sequences=2).shape == (4, 18)
    assert model.generate(x, **PLAIN | {"do_sample": True}, num_return_sequences=3, top_p=0.9).shape == (6, 18)

    class AtFifteen(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 15)

    stopped = model.generate(x, **PLAIN, stopping_criteria=StoppingCriteriaList([AtFifteen()]))
    assert torch.equal(stopped, greedy[:, :15])
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(x), **PLAIN)
    assert torch.equal(embedded, greedy[:, 12:])
    found = model.generate(x, **PLAIN, return_dict_in_generate=True, output_logits=True, output_hidden_states=True)
    assert torch.equal(found.sequences, greedy) and len(found.logits) == len(found.hidden_states) == 6


def test_a_streamer_hears_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer, x = model_of("gla").eval(), byte_tokenizer(), torch.tensor([list(b"hello")])
    greedy = model.generate(x, streamer=TextStreamer(tokenizer), **PLAIN)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(greedy[0]).strip("\n")


@pytest.mark.parametrize(
    "how", [{"assistant_model": "itself"}, {"prompt_lookup_num_tokens": 3}], ids=["model", "lookup"]
)
def test_assisted_generation_is_refused(how: dict[str, Any]) -> None:
    model = model_of("gla").eval()
    how = {name: model_of("gla") if value == "itself" else value for name, value in how.items()}
    with pytest.raises(ValueError, match="not supported with stateful models, such as RecurrentLM"):
        model.generate(ids(1), **PLAIN, **how)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_pipeline_continues_texts_of_different_lengths(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [Kept(logging.WARNING)])
    write = pipeline("text-generation", model=str(checkpoint), device="cpu", batch_size=2)
    texts = ["hello", "a longer beginning", "b"]
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    together = [found[0]["generated_text"] for found in write(texts, **options)]
    assert together == [write(text, batch_size=1, **options)[0]["generated_text"] for text in texts]
    assert not [message for message in seen if "not supported" in message]
