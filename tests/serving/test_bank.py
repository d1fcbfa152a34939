"""The bank: texts read once, exact in another process, refused by another model."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longrecall import Engine, RecurrentState
from longrecall.errors import UserError
from longrecall.locks import hold, lock_file_of
from longrecall.models.state import FORMAT
from longrecall.serving import Bank
from longrecall.serving.text_stream import StopStrings
from tests.serving.test_engine import generated, model_of, prompts_of

TEXT = prompts_of(1, seed=9)[0] * 30
OTHER_PROCESS = """
import json, sys
from longrecall import Engine
from tests.serving.test_engine import model_of
with Engine(model_of(sys.argv[1]), bank=sys.argv[2]) as engine:
    engine.bank.add("theirs", [4, 5, 6])
    print(json.dumps(engine.submit([7, 8], after="book", max_new_tokens=12).result().ids))
"""


@pytest.mark.parametrize("name", ["gated_delta_net", "hybrid"])
def test_answers_are_those_to_the_text_itself(name: str, tmp_path: Path) -> None:
    """And those of another engine, whose model was built anew."""
    model = model_of(name)
    with Engine(model, slots=2, bank=tmp_path) as engine:
        assert engine.bank is not None
        engine.bank.add("book", TEXT)
        here = engine.submit([7, 8], after="book", max_new_tokens=12).result().ids
        assert here == generated(model, [*TEXT, 7, 8], 12)
    with Engine(model_of(name), slots=2, bank=tmp_path) as engine:
        assert engine.submit([7, 8], after="book", max_new_tokens=12).result().ids == here


def test_shared_beginnings_know_what_came_before(tmp_path: Path) -> None:
    """The same prompts, after a text and after nothing: each goes on from its own state."""
    model, begin = model_of("hybrid"), TEXT[:300][::-1]
    with Engine(model, slots=2, bank=tmp_path) as engine:
        assert engine.bank is not None
        engine.bank.add("book", TEXT)
        for last in (1, 2, 3):
            found = engine.submit([*begin, last], after="book", max_new_tokens=4).result()
            plain = engine.submit([*begin, last], max_new_tokens=4).result()
            assert found.ids == generated(model, [*TEXT, *begin, last], 4)
            assert plain.ids == generated(model, [*begin, last], 4)
            assert found.cached_tokens == plain.cached_tokens == (256 if last == 3 else 0)


def test_a_text_that_is_replaced_while_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions take the old text; what is kept of their common beginning is nothing for the new one."""
    model, begin, new = model_of("hybrid"), TEXT[:300][::-1], [5, 6, 7]
    with Engine(model, slots=2, bank=tmp_path) as engine:
        assert engine.bank is not None
        engine.bank.add("book", TEXT)
        looks, encode = [], engine._ids

        def replacing(prompt: list[int], special: bool) -> list[int]:
            looks.append(prompt)
            if len(looks) == 1:
                engine.submit([*begin, 2], after="book", max_new_tokens=1).result()
            elif len(looks) == 2:
                engine.bank.add("book", new, force=True)  # type: ignore[union-attr]
            return encode(prompt, special)

        monkeypatch.setattr(engine, "_ids", replacing)
        engine.submit([*begin, 1], after="book", max_new_tokens=1).result()
        found = engine.submit([*begin, 3], after="book", max_new_tokens=4).result()
    assert found.cached_tokens == 0 and found.ids == generated(model, [*new, *begin, 3], 4)


def test_files_that_are_no_whole_states(tmp_path: Path) -> None:
    model = model_of("gla")
    bank = Bank(tmp_path, model)
    metadata = {"format": FORMAT, "fingerprint": model.fingerprint(), "length": "1"}
    one = torch.ones(1, dtype=torch.long)
    for index, (tensors, said) in enumerate(
        [({"other": one}, metadata), ({"0.recurrent": one}, metadata), ({"position": one}, {"format": FORMAT})]
    ):
        save_file(tensors, bank.path(f"broken{index}"), metadata=said)
    (tmp_path / "broken3.safetensors").write_bytes(b"")
    for name in bank.names():
        with pytest.raises(UserError, match=f"{name}.* (is not a whole|holds the state)"):
            bank.state(name)


@pytest.mark.slow
def test_another_process_answers_the_same(tmp_path: Path) -> None:
    """And what it adds is here too."""
    model = model_of("hybrid")
    with Engine(model, slots=2, bank=tmp_path) as engine:
        assert engine.bank is not None
        engine.bank.add("book", TEXT)
        here = engine.submit([7, 8], after="book", max_new_tokens=12).result().ids
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, "hybrid", str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(here)
        assert engine.bank.names() == ["book", "theirs"]
        ids = engine.submit([7], after="theirs", max_new_tokens=5).result().ids
        assert ids == generated(model, [4, 5, 6, 7], 5)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Others are told so; readers see the old file or the new one."""
    bank = Bank(tmp_path, model_of("gla"))
    with hold(lock_file_of(bank.path("book")), "book", "wait"):
        found: list[BaseException] = []

        def write() -> None:
            try:
                bank.add("book", [1, 2])
            except UserError as error:
                found.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert found and bank.names() == []


def test_a_bank_without_an_engine(tmp_path: Path) -> None:
    model = model_of("gla")
    bank = Bank(tmp_path / "bank", model)
    assert bank.names() == []
    path = bank.add("one", [1, 2, 3])
    bank.add("two", [4, 5], after="one")
    state = RecurrentState.load(path, model)
    with torch.no_grad():
        out = model(torch.tensor([[1, 2, 3]]))
    assert all(
        torch.equal(x[key], y[key]) for x, y in zip(state.layers, out.past_key_values.layers, strict=True) for key in x
    )
    with Engine(model, bank=tmp_path / "bank") as engine:
        ids = engine.submit([6], after="two", max_new_tokens=6).result().ids
    assert ids == generated(model, [1, 2, 3, 4, 5, 6], 6)
    with pytest.raises(UserError, match="exists already"):
        bank.add("one", [9])
    bank.add("one", [9], force=True)
    assert int(bank.state("one").position) == 1, "a text that was replaced is read anew"
    bank.remove("two")
    with pytest.raises(UserError, match='no text "tvo"'):
        bank.state("tvo")
    assert bank.names() == ["one"]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    Bank(tmp_path, model_of("gla")).add("book", [1, 2])
    other = model_of("gla")
    with torch.no_grad():
        other.model.embeddings.weight[3, 4] += 1
    with Engine(other, bank=tmp_path) as engine, pytest.raises(UserError, match="holds the state of model"):
        engine.submit([1], after="book")


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "a" * 101])
def test_names_that_no_text_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot name a text"):
        Bank(tmp_path, model_of("gla")).path(name)


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    bank = Bank(tmp_path, model_of("gla"))
    for text, words in ([], "no token"), ([99], "token ids"), ("words", "no tokenizer"):
        with pytest.raises(UserError, match=words):
            bank.add("book", text)
    assert bank.names() == [] and not list(tmp_path.glob("*.safetensors"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a folder"):
        Bank(tmp_path / "file", model_of("gla"))


def test_stop_strings_over_the_ends_of_pieces() -> None:
    stops = StopStrings(("END", "x"))
    assert [stops.add(piece) for piece in ("a E", "N", "Dx")] == [False, False, True]
    assert stops.text == "a "
