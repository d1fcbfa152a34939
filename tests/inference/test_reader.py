"""Long texts in segments: what one pass computes, in memory that grows only with what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longrecall.inference import reader
from longrecall.inference.reader import segment_length, why_one_pass
from longrecall.models import state as state_of_models
from longrecall.models.long_texts import Text, Wanted
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import unread_states, whole_texts
from tests.conftest import MIXERS
from tests.inference.test_decoding import model_of

SEGMENT = 16
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Float32 sums in another order, as for prompts in captured segments."""


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Short segments; the list gets the columns of every one that is read."""
    read: list[int] = []
    inner = reader._segment

    def counting(model: Any, given: Any, state: Any, own: slice, *more: Any) -> Any:
        read.append(own.stop - own.start)
        return inner(model, given, state, own, *more)

    monkeypatch.setattr(reader, "LEAST_TOKENS", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(reader, "segment_length", lambda model, rows, columns: min(SEGMENT, columns))
    monkeypatch.setattr(reader, "_segment", counting)
    return read


def ids_of(rows: int, columns: int) -> Tensor:
    return torch.randint(0, 40, (rows, columns), generator=torch.Generator().manual_seed(4))


def assert_same_state(model: RecurrentLM, found: RecurrentState, expected: RecurrentState) -> None:
    """That two states are those of the same text: caches by what is read from them, as they hold padding too."""
    assert found.length == expected.length and torch.equal(found.position, expected.position)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.keys() == other.keys()
        if not any(name.endswith("position") for name in one):
            for name in one:
                torch.testing.assert_close(one[name], other[name], **TOLERANCE)
    more = ids_of(found.batch_size, 3)
    with torch.no_grad():
        one, other = (model(more, past_key_values=state).logits for state in (found, expected))
    torch.testing.assert_close(one, other, **TOLERANCE)


def both(model: RecurrentLM, segments: list[int], *args: Any, **options: Any) -> tuple[Any, Any]:
    """The outputs in one pass and in segments."""
    segments.clear()
    with torch.no_grad():
        with whole_texts():
            expected = model(*args, **options)
        assert not segments
        return expected, model(*args, **options)


def is_cut(model: RecurrentLM) -> bool:
    mixers = reader._mixers(model)
    return not any(mixer.grows and (mixer.reads_tokens or mixer.why_no_room()) for mixer in mixers)


@pytest.mark.parametrize("name", MIXERS)
def test_segments_equal_one_pass(name: str, segments: list[int]) -> None:
    model, ids = model_of(MIXERS[name]), ids_of(3, 40)
    real = torch.ones_like(ids)
    # Padding before, behind (a whole segment of it) and among the tokens.
    real[0, :19], real[1, 21:], real[2, 7:9] = 0, 0, 0
    labels = torch.where(real == 1, ids, -100)
    options = {"attention_mask": real, "labels": labels, "output_hidden_states": True}
    expected, found = both(model, segments, ids, **options)
    assert len(segments) == (3 if is_cut(model) else 0)
    seen = real.bool()
    torch.testing.assert_close(found.logits[seen], expected.logits[seen], **TOLERANCE)
    torch.testing.assert_close(found.loss, expected.loss, **TOLERANCE)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one[seen], other[seen], **TOLERANCE)
    assert_same_state(model, found.past_key_values, expected.past_key_values)


def documents_of(model: RecurrentLM, ids: Tensor) -> dict[str, dict[str, Any]]:
    """Calls with everything that a caller may want."""
    begun = model(ids[:, :9]).past_key_values
    labels = ids.clone()
    labels[:, ::3] = -100
    return {
        "the last logits": {"input_ids": ids, "logits_to_keep": 1},
        "some logits, in any order": {"input_ids": ids, "logits_to_keep": torch.tensor([39, 2, 17, 2, -1])},
        "marked logits": {"input_ids": ids, "logits_to_keep": torch.arange(ids.shape[1]) % 7 == 3},
        "a loss alone": {"input_ids": ids, "labels": labels, "loss_only": True, "num_items_in_batch": 11},
        "from a state": {"input_ids": ids, "past_key_values": begun, "logits_to_keep": 3},
        "embeddings": {"inputs_embeds": model.model.embeddings(ids), "logits_to_keep": 25},
        "documents": {
            "input_ids": ids[:1],
            "cu_seqlens": torch.tensor([0, 3, 30, 40]),
            "labels": labels[:1],
            "output_hidden_states": True,
        },
        "documents in rows": {
            "input_ids": ids,
            "position_ids": torch.cat([torch.arange(21), torch.arange(19)]).expand(2, -1),
            "logits_to_keep": 2,
        },
        "no labels at all": {"input_ids": ids, "labels": torch.full_like(ids, -100), "loss_only": True},
        "a tuple": {"input_ids": ids, "return_dict": False, "use_cache": False},
    }


@pytest.mark.parametrize("changes", [{}, {"logits_multiplier": 2.0}, {"logits_soft_cap": 3.0}])
def test_what_callers_keep(changes: dict[str, float], segments: list[int]) -> None:
    model, ids = model_of(MIXERS["gated_delta_net"]), ids_of(2, 40)
    model.logit_scale = model.logit_scale._replace(**{k.removeprefix("logits_"): v for k, v in changes.items()})
    with torch.no_grad():
        cases = documents_of(model, ids)
    for case, options in cases.items():
        expected, found = both(model, segments, **options)
        assert segments, case
        if case == "a tuple":
            torch.testing.assert_close(found, expected, **TOLERANCE)
            continue
        assert found.keys() == expected.keys(), case
        for key in expected.keys() - {"past_key_values"}:
            torch.testing.assert_close(found[key], expected[key], msg=f"{case}: {key}", **TOLERANCE)
        assert_same_state(model, found.past_key_values, expected.past_key_values)


def test_states_between_segments_are_read(segments: list[int]) -> None:
    model, ids = model_of(MIXERS["h3"]), ids_of(2, 40)
    with unread_states():
        expected, found = both(model, segments, ids)
    torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
    assert len(segments) == 3


def test_what_is_read_in_one_pass(segments: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of(MIXERS["gla"]), ids_of(1, 40)
    text, wanted = Text(ids, None, None, None, None), Wanted(None, None, 0, False, False)
    assert why_one_pass(model, text, wanted) == "gradients are wanted"
    model(ids, labels=ids).loss.backward()
    model.requires_grad_(False)
    assert why_one_pass(model, text, wanted) is None
    given = model.model.embeddings(ids).requires_grad_()
    assert why_one_pass(model, text._replace(embeddings=given), wanted) == "gradients are wanted"
    handle = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert "hooks" in str(why_one_pass(model, text, wanted))
    model(ids)
    handle.remove()
    model.train()
    model(ids)
    model.eval()
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        model(ids)
    assert not segments
    model(ids)
    assert len(segments) == 3
    for options in ({"loss_only": True}, {"labels": ids, "logits_to_keep": 3}):
        with pytest.raises(ValueError):
            model(ids, **options)
    with pytest.raises(IndexError):
        model(ids, logits_to_keep=torch.tensor([40]))


class Watch(TorchDispatchMode):
    """How many bytes all tensors have at most that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.alive = {key: known for key, known in self.alive.items() if not known[0].expired()}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return found


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Segments of the least length, for a model as small as this one.
    monkeypatch.setattr(reader, "WORKSPACE", {"cpu": 1 << 20, "cuda": 1 << 20})
    model = model_of(MIXERS["mamba2"])
    peaks = {}
    for columns in (2048, 8192):
        ids = ids_of(1, columns)
        for name, options in {"logits": {"logits_to_keep": 1}, "loss": {"labels": ids, "loss_only": True}}.items():
            with torch.no_grad(), Watch() as watch:
                model(ids, **options)
            peaks[name, columns] = watch.peak
    # Of every token its id, and with a loss its label and its place among those that have one.
    assert peaks["logits", 8192] < 1.1 * peaks["logits", 2048] + 8 * 4 * 8192
    assert peaks["loss", 8192] < 1.1 * peaks["loss", 2048] + 8 * 12 * 8192


def test_a_state_keeps_no_text_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last inputs of a convolution are a view of all of them, which a state would keep in every layer."""
    monkeypatch.setattr(state_of_models, "LARGE", 0)
    for name, mixer in MIXERS.items():
        model = model_of(mixer)
        with torch.no_grad():
            layers = model(ids_of(2, 40)).past_key_values.layers
        kept = {key: (x.untyped_storage().nbytes(), x.nbytes) for layer in layers for key, x in layer.items()}
        assert all(memory <= own for memory, own in kept.values()), (name, kept)


def test_lengths_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MIXERS["gla"])
    longest = segment_length(model, 1, 1 << 20)
    assert longest % reader.LEAST_COLUMNS == 0 and segment_length(model, 1, longest) == longest
    # In equal parts, not a whole one and a rest of a few tokens.
    assert segment_length(model, 1, longest + 1) < 0.6 * longest
    assert segment_length(model, 1 << 20, 1 << 20) == reader.LEAST_COLUMNS
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj = nn.Linear(32, 50000)
    assert segment_length(model, 1, 1 << 20) == reader.LEAST_TOKENS["cpu"]
