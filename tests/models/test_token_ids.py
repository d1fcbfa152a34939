"""Tokens that are none, prompts without any, and what a forward pass is asked to return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.loading import load
from longrecall.models.recurrent_lm import RecurrentLM, RecurrentOutput

LAYERS = [{"mixer": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 4}, "mlp_size": 8}] * 2
IDS = torch.tensor([[3, 1, 2], [0, 5, 16]])


@pytest.fixture(scope="module")
def model() -> RecurrentLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RecurrentLM(RecurrentConfig(vocab_size=17, hidden_size=8, layers=LAYERS)).eval()


@pytest.mark.parametrize(("wrong", "named"), [(17, 17), (-1, -1), (10**9, 10**9)])
def test_ids_outside_of_the_vocabulary(wrong: int, named: int, model: RecurrentLM) -> None:
    ids = IDS.clone()
    ids[1, 2] = wrong
    told = rf"^token id {named} is not in the model's vocabulary, whose ids are 0 to 16; "
    for call in (model, lambda ids: model(IDS, labels=ids), lambda ids: model(IDS, labels=ids, loss_only=True)):
        with pytest.raises(UserError, match=told):
            call(ids)
    with pytest.raises(UserError, match=told):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(UserError, match=told):
        model.generate(ids, max_new_tokens=2, num_beams=2)


@pytest.mark.parametrize("ids", [IDS[0], IDS[None], IDS.float(), IDS.bool(), IDS.to(torch.uint8)])
def test_ids_of_another_form(ids: torch.Tensor, model: RecurrentLM) -> None:
    with pytest.raises(UserError, match=r"^input_ids must be whole numbers \(int64\) of shape \[B, T\]; got "):
        model(ids)


def test_int32_is_as_good(model: RecurrentLM) -> None:
    with torch.no_grad():
        assert torch.equal(model(IDS.int()).logits, model(IDS).logits)


@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(0, 0)])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_nothing_to_continue(rows: slice, options: dict[str, Any], model: RecurrentLM) -> None:
    empty = IDS[rows, :0] if rows.stop != 0 else IDS[rows]
    told = rf"^there is nothing to continue: the prompt has shape \[{empty.shape[0]}, {empty.shape[1]}\]; "
    with pytest.raises(UserError, match=told):
        model.generate(empty, max_new_tokens=2, **options)
    with pytest.raises(UserError, match=told):
        model.generate(inputs_embeds=model.get_input_embeddings()(empty), max_new_tokens=2, **options)


def test_a_forward_pass_over_no_tokens_changes_nothing(model: RecurrentLM) -> None:
    with torch.no_grad():
        state = model(IDS).past_key_values
        out = model(IDS[:, :0], past_key_values=state)
    assert out.logits.shape == (2, 0, 17) and out.past_key_values.length == state.length


def test_a_tokenizer_with_more_tokens_than_the_model(
    model: RecurrentLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(model, tmp_path / "small", byte_tokenizer())
    assert main(["generate", str(tmp_path / "small"), "--prompt", "abc"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("small has 258 tokens, but the model only 17")


def test_a_token_that_was_added_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = byte_tokenizer()
    words.add_tokens(["<new>"])
    folder = tmp_path / "added"
    save(RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=8, layers=LAYERS)), folder, words)
    assert main(["generate", str(folder), "--prompt", "abc", "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    assert main(["generate", str(folder), "--prompt", "a<new>"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'the prompt has "<new>", token 258, but the model in ' in line and "only the tokens 0 to 257" in line


def test_a_prompt_without_a_token_that_begins_a_text(
    model: RecurrentLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=8, layers=LAYERS)), tmp_path / "out", byte_tokenizer())
    assert main(["generate", str(tmp_path / "out"), "--prompt", ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_attention_weights_are_refused(model: RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"^output_attentions: a recurrence has no attention weights to return"
    for ask in (
        lambda: model(IDS, output_attentions=True),
        lambda: model.generate(IDS, max_new_tokens=2, output_attentions=True),
        lambda: model.generate(IDS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True),
    ):
        with pytest.raises(UserError, match=told):
            ask()
    monkeypatch.setattr(model.config, "output_attentions", True)
    with pytest.raises(UserError, match=told):
        model(IDS)
    assert model(IDS, output_attentions=False).logits is not None


def test_tuples_and_hidden_states_as_transformers_returns_them(
    model: RecurrentLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        full = model(IDS, labels=IDS, output_hidden_states=True)
        plain = model(IDS, labels=IDS, output_hidden_states=True, return_dict=False)
        assert isinstance(full, RecurrentOutput) and isinstance(plain, tuple)
        assert torch.equal(plain[0], full.loss) and torch.equal(plain[1], full.logits)
        assert len(plain) == 4 and len(plain[3]) == len(full.hidden_states) == len(LAYERS) + 1
        assert len(model(IDS, use_cache=False, return_dict=False)) == 1
        monkeypatch.setattr(model.config, "output_hidden_states", True)
        assert len(model(IDS).hidden_states) == 3 and model(IDS, output_hidden_states=False).hidden_states is None
        monkeypatch.setattr(model.config, "return_dict", False)
        assert isinstance(model(IDS), tuple) and isinstance(model(IDS, return_dict=True), RecurrentOutput)
        # transformers asks for what it needs.
        out = model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True)
    assert len(out.hidden_states) == 2 and len(out.hidden_states[0]) == 3


def test_a_file_does_not_say_what_our_calls_return(model: RecurrentLM, tmp_path: Path) -> None:
    save(model, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), **asked}))
    assert load(tmp_path / "out")(IDS).logits.shape == (2, 3, 17)
    # Who loads it with transformers has what transformers would give.
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.config.output_hidden_states and not again.config.return_dict
    assert isinstance(again(IDS, output_attentions=False), tuple)
