"""Memory that runs out, and lengths that cannot fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import RecurrentConfig, RecurrentLM
from longrecall.errors import UserError
from longrecall.evaluation import evaluate, memory

OPTIONS = {"passkey": {"depths": (0.5,)}, "babilong": {"tasks": ("qa1",), "answer_tokens": 4}}
TASKS = ["passkey", "babilong", "bits_per_byte"]
TEXT = "Some words to read, and some more. " * 60
CPU_FAILURE = (
    "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


def run(model: Any, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"samples": 8, "text": TEXT, "options": OPTIONS, "progress": False}
    return evaluate(model, tokenizer, TASKS, [250], **(settings | changes))


def limit(model: RecurrentLM, tokens: int, error: Exception) -> list[int]:
    """Let the model fail like a full device on more than `tokens` tokens at once; return the sizes it was given."""
    seen: list[int] = []

    def check(_: Any, args: Any) -> None:
        seen.append(args[0].numel())
        if args[0].numel() > tokens:
            raise error

    model.register_forward_pre_hook(check)
    return seen


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(CPU_FAILURE)])
@pytest.mark.parametrize("tokens", [1000, 250, 100])
def test_batches_are_halved_until_they_fit(
    model: RecurrentLM, tokenizer: Any, tokens: int, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(model, tokenizer)
    seen = limit(model, tokens, error)
    small = run(model, tokenizer)
    for a, b in zip(whole["results"], small["results"], strict=True):
        if a["task"] == "bits_per_byte":
            # A mean of float32 losses, from batches of other sizes.
            assert a["value"] == pytest.approx(b["value"], rel=1e-5)
        else:
            assert a | {"seconds": 0} == b | {"seconds": 0}
    failed = [size for size in seen if size > tokens]
    # Each failure halves something, so they are few; and nothing is tried again at a size that has failed.
    assert 1 <= len(failed) <= 8 and failed == sorted(set(failed), reverse=True)
    assert "out of memory" in capsys.readouterr().err


def test_not_even_one_sequence_fits(model: RecurrentLM, tokenizer: Any) -> None:
    limit(model, 20, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match="out of memory with a single sequence, read in segments of 32 tokens"):
        run(model, tokenizer)


def test_other_errors_are_not_taken_for_memory(model: RecurrentLM, tokenizer: Any) -> None:
    limit(model, 20, RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(model, tokenizer)


def attention_model() -> RecurrentLM:
    mixer = {"type": "attention", "num_heads": 2, "head_dim": 8}
    return RecurrentLM(RecurrentConfig(vocab_size=258, hidden_size=16, layers=[{"mixer": mixer, "mlp_size": 16}]))


@pytest.mark.parametrize(
    ("length", "memory_bytes", "words"),
    [
        # Keys and values of one layer: 2 * 2 * 8 numbers of 4 bytes a token; a sample takes 32 bytes a token.
        (4096, 4096 * 128 - 1, "length 4k takes 0.0 GiB for the keys and values of attention layers"),
        (4096, 4096 * 32 - 1, "length 4k takes 0.0 GiB for its tokens alone"),
        (2**53, 2**40, "length 8589934592m takes 268435456.0 GiB for its tokens alone"),
    ],
)
def test_lengths_that_cannot_fit_are_refused_before_the_work(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, length: int, memory_bytes: int, words: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: memory_bytes)
    with pytest.raises(UserError, match=re.escape(words)):
        evaluate(attention_model(), tokenizer, ["passkey"], [length], 1, out=tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_lengths_that_just_fit_are_not_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 512 * 128)
    options = {"passkey": {"depths": (0.5,)}}
    assert evaluate(attention_model(), tokenizer, ["passkey"], [512], 1, options=options, progress=False)["results"]


def test_a_recurrent_model_is_refused_for_its_tokens_alone(
    model: RecurrentLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 512 * 32)
    options = {"passkey": {"depths": (0.5,)}}
    assert evaluate(model, tokenizer, ["passkey"], [512], 1, options=options, progress=False)["results"]


def test_the_memory_of_this_machine_is_known() -> None:
    found = memory.machine_memory()
    assert found is not None and 2**28 < found < 2**50
