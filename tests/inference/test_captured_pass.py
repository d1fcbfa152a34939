"""Plain calls in captured segments: what one pass computes, whatever the caller keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.inference import captured_pass as captured
from longrecall.inference import reader
from longrecall.inference.eligibility import why_no_room
from longrecall.inference.segments import CapturedSegments
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import whole_texts
from tests.conftest import MIXERS
from tests.inference.test_decoding import model_of
from tests.inference.test_reader import TOLERANCE, assert_same_state, ids_of

LENGTHS = (8, 16)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Short segments on a CPU, where they run eagerly; the list gets the columns of every one that is read."""
    read: list[int] = []

    class Counted(CapturedSegments):
        def read_piece(self, ids: Tensor, start: int) -> Tensor:
            hidden = super().read_piece(ids, start)
            read.append(hidden.shape[1])
            return hidden

    def segments(model: RecurrentLM, rows: int, columns: int, where: Any) -> CapturedSegments:
        room = 0 if captured.why_no_room(model, 1 << 20) is None else 64
        known: dict[Any, CapturedSegments] = model.__dict__.setdefault("counted", {})
        return known.setdefault(rows, Counted(model, rows, LENGTHS, room=room))

    monkeypatch.setattr(reader, "may_capture", lambda source: source.shape[1] >= LENGTHS[0])
    monkeypatch.setattr(captured, "why_no_graph", lambda model: None)
    monkeypatch.setattr(captured, "captured_segments", segments)
    return read


def both(model: RecurrentLM, **options: Any) -> tuple[Any, Any]:
    """The outputs in one pass and in segments; a rest is read in one pass the first time."""
    with torch.no_grad():
        with whole_texts():
            expected = model(**options)
        model(**options)
        return expected, model(**options)


@pytest.mark.parametrize("name", MIXERS)
def test_segments_equal_one_pass(name: str, pieces: list[int]) -> None:
    model, ids = model_of(MIXERS[name]), ids_of(2, 39)
    expected, found = both(model, input_ids=ids, labels=ids)
    served = why_no_room(model, 39) is None
    assert pieces == ([16, 16, 7] if served else [])
    torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
    torch.testing.assert_close(found.loss, expected.loss, **TOLERANCE)
    assert_same_state(model, found.past_key_values, expected.past_key_values)


def calls(model: RecurrentLM, ids: Tensor) -> dict[str, dict[str, Any]]:
    with torch.no_grad():
        begun = model(ids[:, :5]).past_key_values
    return {
        "the last logits": {"logits_to_keep": 1},
        "the last logits of two segments": {"logits_to_keep": 20},
        "some logits": {"logits_to_keep": torch.tensor([38, 2, -1])},
        "a loss alone": {"labels": ids, "loss_only": True},
        "a mask of ones": {"attention_mask": torch.ones_like(ids)},
        "from a state": {"past_key_values": begun},
    }


@pytest.mark.parametrize("what", calls(model_of(MIXERS["gla"]), ids_of(2, 39)))
def test_what_callers_keep(what: str, pieces: list[int]) -> None:
    model, ids = model_of(MIXERS["gated_delta_net"]), ids_of(2, 39)
    options = calls(model, ids)[what]
    pieces.clear()
    expected, found = both(model, input_ids=ids, **options)
    assert pieces == [16, 16, 7]
    for name in ("logits", "loss"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other, **TOLERANCE)
    assert_same_state(model, found.past_key_values, expected.past_key_values)


def test_outputs_are_nobody_elses(pieces: list[int]) -> None:
    """The next call overwrites neither logits nor the state of the one before; nor does a call inside of another."""
    model = model_of(MIXERS["gla"])
    one, other = ids_of(1, 32), ids_of(1, 32).flip(1)
    with torch.no_grad():
        first = model(one)
        kept = first.logits.clone(), first.past_key_values.map(Tensor.clone)
        model(other, past_key_values=first.past_key_values)
        assert pieces == [16] * 4
        with model.captured_steps.alone():
            model(other)
    assert pieces == [16] * 4, "somebody else is at work with the segments"
    assert torch.equal(first.logits, kept[0])
    assert_same_state(model, first.past_key_values, kept[1])


def test_what_is_read_in_one_pass(pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of(MIXERS["gla"]), ids_of(2, 32)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask)
        model(ids, output_hidden_states=True)
        model(inputs_embeds=model.model.embeddings(ids))
        model(ids, cu_seqlens=None, position_ids=torch.arange(32).remainder(16).expand(2, -1))
        model(ids[:, :4])
    model(ids)  # gradients
    assert not pieces

    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(CapturedSegments, "prepare", refuse)
    with torch.no_grad(), pytest.warns(UserWarning, match="without CUDA graphs, which failed: CUDA error"):
        model(ids)
    assert not pieces


def test_sizes() -> None:
    """Nothing off a GPU; on one neither single tokens nor what keeps it busy by itself."""
    assert not captured.may_capture(ids_of(1, 512))

    def served(rows: int, columns: int) -> bool:
        class There:
            device, shape = torch.device("cuda"), (rows, columns)

        return captured.may_capture(There())  # type: ignore[arg-type]

    assert served(1, 512) and served(1, 4 * 4096) and served(4, 4096)
    assert not served(1, 1) and not served(1, 65536) and not served(8, 512)
