"""evaluate(): results, resuming, divergence, bad input."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import RecurrentLM
from longrecall.errors import UserError
from longrecall.evaluation import capacity, check_result, evaluate, evaluate_checkpoint, read_result, summarise
from longrecall.files import write_json
from longrecall.tasks import Passkey, Phonebook

TEXT = "It was the best of times, it was the wörst of times. " * 60
OPTIONS = {"phonebook": {"pairs": (1, 4)}, "passkey": {"depths": (0.0, 1.0)}}
ALL = ["phonebook", "passkey", "bits_per_byte"]


class Oracle(torch.nn.Module):
    """Answers every phone book query by looking it up in the bytes, but only among the last `memory` entries."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.device = torch.device("cpu")
        self.config = type("Config", (), {"vocab_size": 258})()

    def forward(self, ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
        state = [b""] * len(ids) if past_key_values is None else past_key_values
        logits = torch.zeros(*ids.shape, 258)
        for row in range(len(ids)):
            for column in range(ids.shape[1]):
                byte = int(ids[row, column]) % 256  # the opening token is 256; any byte that ends a word will do
                state = [*state[:row], state[row] + bytes([byte]), *state[row + 1 :]]
                logits[row, column, self.next_byte(state[row])] = 1.0
        return type("Output", (), {"logits": logits, "past_key_values": state})()

    def next_byte(self, seen: bytes) -> int:
        entries = re.findall(rb"(?<!\?)\b([a-z]{2} [0-9]{2})\n", seen.split(b"?")[0])[-self.memory :]
        line = seen.split(b"\n")[-1].removeprefix(b"?")
        return next((entry[len(line)] for entry in entries if line and entry.startswith(line) and line != entry), 0)


def run(model: Any, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tasks": ALL,
        "lengths": [128, "256"],
        "samples": 6,
        "text": TEXT,
        "options": OPTIONS,
        "progress": False,
    }
    return evaluate(model, tokenizer, **(arguments | changes))


def test_result_follows_the_schema_and_survives_json(model: RecurrentLM, tokenizer: Any) -> None:
    result = run(model, tokenizer)
    check_result(result, "here")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    cells = [(entry["task"], tuple(entry["cell"].values())) for entry in result["results"]]
    assert cells == [
        ("phonebook", (1, 0)),
        ("phonebook", (4, 0)),
        ("passkey", (128, 0.0)),
        ("passkey", (128, 1.0)),
        ("passkey", (256, 0.0)),
        ("passkey", (256, 1.0)),
        ("bits_per_byte", (0, 256)),
        ("bits_per_byte", (0, 256)),
    ]
    assert [entry["count"] for entry in result["results"][:6]] == [6] * 6
    assert [entry["sequences"] for entry in result["results"][:2]] == [6, 3]
    assert result["checkpoint"]["fingerprint"] == model.fingerprint()
    assert result["checkpoint"]["state_size"] == model.state_size()
    # A key and a value of full width in every layer.
    assert result["checkpoint"]["transformer_cache"] == 2 * model.config.hidden_size * len(model.config.layers) > 0
    assert set(result["summary"]) == {
        "phonebook.capacity",
        "passkey.accuracy",
        "passkey.accuracy.length=128",
        "passkey.accuracy.length=256",
        "bits_per_byte",
    }


def test_an_oracle_is_right_and_a_forgetful_one_is_right_as_often_as_it_should(tokenizer: Any) -> None:
    for pairs in (4, 8):
        # Every pair is asked once, so the last 4 of 8 are known exactly.
        options = {"phonebook": {"pairs": (pairs,), "queries": pairs}}
        full = evaluate(
            Oracle(99), tokenizer, ["phonebook"], [1], 64, options=options, progress=False, segment_tokens=20
        )
        assert [entry["value"] for entry in full["results"]] == [1.0]
        assert full["summary"]["phonebook.capacity"] == pairs
        assert full["checkpoint"]["transformer_cache"] is None, "a config without width and depth"
        short = evaluate(Oracle(4), tokenizer, ["phonebook"], [1], 64, options=options, progress=False)
        assert [entry["value"] for entry in short["results"]] == [4 / pairs]
        assert short["summary"]["phonebook.capacity"] == (4 if pairs == 4 else 0)


def test_batches_and_segments_change_nothing(model: RecurrentLM, tokenizer: Any) -> None:
    one = run(model, tokenizer)["results"]
    other = run(model, tokenizer, batch_tokens=70, segment_tokens=33)["results"]
    for a, b in zip(one, other, strict=True):
        # float32 sums in another order; values are accuracies or of size 10 and, for perplexities, relative.
        assert a["value"] == pytest.approx(b["value"], rel=1e-3)
        assert (a["count"], a["cell"]) == (b["count"], b["cell"])


def test_bits_per_byte_against_the_model_itself(model: RecurrentLM, tokenizer: Any) -> None:
    text = "abcdefgh" * 40  # 320 bytes: two windows of 128
    result = evaluate(model, tokenizer, ["bits_per_byte"], [128], 9, text=text, progress=False)
    bits, perplexity = result["results"]
    ids = torch.tensor([list(text.encode()[start : start + 128]) for start in (0, 128)])
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    # One token is one byte here; float32 against float64 means.
    assert bits["value"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert perplexity["value"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert (bits["count"], bits["bytes"], bits["sequences"]) == (254, 254, 2)
    assert bits["low"] <= bits["value"] <= bits["high"]


def test_one_window_has_no_interval(model: RecurrentLM, tokenizer: Any) -> None:
    result = evaluate(model, tokenizer, ["bits_per_byte"], [64], 1, text=TEXT, progress=False)
    assert result["results"][0]["low"] is None and result["results"][0]["high"] is None
    check_result(result, "here")


def test_nan_logits_are_reported_as_diverged(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    result = run(model, tokenizer, out=tmp_path / "r.json")
    for entry in result["results"]:
        assert entry["diverged"] == entry["sequences"] > 0
        assert entry["value"] == (0.0 if entry["metric"] == "accuracy" else None)
    assert result["summary"]["phonebook.capacity"] == 0
    assert result["summary"]["bits_per_byte"] is None
    assert read_result(tmp_path / "r.json") == result


def test_training_mode_is_restored(model: RecurrentLM, tokenizer: Any) -> None:
    model.train()
    run(model, tokenizer, tasks=["phonebook"], options={})
    assert model.training


def refuse(*_: Any) -> None:
    raise AssertionError("the model was asked")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": ["phonbook"], "options": {}}, 'Did you mean "phonebook"'),
        ({"tasks": [], "options": {}}, "at least one task"),
        ({"tasks": ["passkey", "passkey"], "options": {}}, "listed 2 times"),
        ({"tasks": ["passkey"]}, "options for phonebook"),
        ({"lengths": ["4q"]}, "'4q' is not a number of tokens"),
        ({"lengths": []}, "at least one length"),
        ({"lengths": [64]}, "passkey: length 64 is too short"),
        ({"lengths": [1], "tasks": ["bits_per_byte"], "options": {}}, "length 1 is too short"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"batch_tokens": 0}, "batch-tokens must be at least 1"),
        ({"text": "too short"}, "the text has 9 tokens, fewer than the length 256"),
        ({"text": None}, "bits_per_byte needs text"),
        ({"text": ""}, "bits_per_byte needs text"),
        ({"options": {"phonebook": {"pairs": (700,)}}}, "700 pairs need 700 distinct names"),
        ({"options": {"phonebook": {"pair": (2,)}}}, 'Did you mean "pairs"'),
        ({"resume": True}, "resume needs an output file"),
    ],
)
def test_bad_input_fails_before_anything_runs(
    model: RecurrentLM, tokenizer: Any, change: dict[str, Any], words: str
) -> None:
    model.register_forward_pre_hook(refuse)
    with pytest.raises(UserError, match=re.escape(words)):
        run(model, tokenizer, **change)


def test_unwritable_output(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file" / "r.json", tmp_path):
        with pytest.raises(UserError, match="cannot write"):
            run(model, tokenizer, out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.json"
    write_json(out, {"old": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_json(out, {"new": 2})
    assert json.loads(out.read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def good_result() -> dict[str, Any]:
    entry = {"task": "t", "cell": {}, "metric": "accuracy", "value": 0.5, "count": 2, "low": None, "high": None}
    return {
        "schema": 1,
        "kind": "evaluation",
        "checkpoint": {},
        "settings": {},
        "environment": {},
        "results": [entry],
        "summary": {},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"kind": "training"}, "kind 'training'"),
        ({"results": {}}, '"results" is missing or not a list'),
        ({"results": [3]}, "results[0] is not an object"),
        ({"results": [{"task": "t"}]}, 'results[0] has no valid "cell"'),
    ],
)
def test_results_are_checked_at_reading(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    check_result(good_result(), "here")
    path = tmp_path / "r.json"
    path.write_text(json.dumps(good_result() | change))
    with pytest.raises(UserError, match=re.escape(words)):
        read_result(path)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_files_that_are_no_results(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"r\.json"):
        read_result(path)
    with pytest.raises(UserError, match="cannot read"):
        read_result(tmp_path / "none.json")


def test_capacity() -> None:
    assert capacity({2: 0.99, 4: 0.9, 8: 0.5}) == 4
    assert capacity({2: 0.5, 4: 0.95}) == 0
    assert capacity({4: 1.0, 2: 1.0, 8: None}) == 4
    assert capacity({}) == 0


def test_summary_of_several_distances() -> None:
    entries = [
        {"task": "phonebook", "cell": {"pairs": pairs, "distance": distance}, "metric": "accuracy", "value": value}
        for pairs, distance, value in [(2, 0, 1.0), (4, 0, 0.95), (2, 64, 0.91), (4, 64, 0.2)]
    ]
    assert summarise(entries) == {"phonebook.capacity": 4, "phonebook.capacity.distance=64": 2}


def test_task_objects(model: RecurrentLM, tokenizer: Any) -> None:
    tasks = [Phonebook(pairs=(2,), length=64), Passkey(depths=(0.5,), form="infinitebench")]
    result = evaluate(model, tokenizer, tasks, [300], 3, progress=False)
    assert [entry["task"] for entry in result["results"]] == ["phonebook", "passkey"]
    # 64 bytes hold 2 entries of 6 and 7 whole queries of 7.
    assert result["results"][0]["count"] == 3 * 7


def test_evaluate_checkpoint(model: RecurrentLM, tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    arguments: dict[str, Any] = {"device": "cpu", "progress": False, "options": {"phonebook": {"pairs": (2,)}}}
    bare = evaluate_checkpoint(folder, ["phonebook"], [128], 4, **arguments)
    assert bare["checkpoint"]["path"] == str(folder)
    assert bare["checkpoint"]["fingerprint"] == model.fingerprint()
    tokenizer.save_pretrained(folder)
    again = evaluate_checkpoint(folder, ["phonebook"], [128], 4, **arguments)
    assert [entry | {"seconds": 0} for entry in again["results"]] == [e | {"seconds": 0} for e in bare["results"]]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        evaluate_checkpoint(folder, ["phonebook"], [128], 4, **arguments)
    with pytest.raises(UserError, match='Did you mean "passkey"'):
        evaluate_checkpoint(tmp_path / "nowhere", ["paskey"], [128], 4)
