"""Reading prompts in segments with attention layers: the same as one pass. On a CPU the segments run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.inference.reading import captured_segments, read_captured, read_prompt
from longrecall.inference.segments import EAGER_FIRST, CapturedSegments, Kind
from longrecall.inference.step import DecodingStep
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.ops.execution import fixed_shapes
from tests.conftest import MIXERS
from tests.inference.test_decoding import NoValues

SHORT, LONG, ROOM = 8, 32, 96
FULL, WINDOW = MIXERS["attention"] | {"window": None}, MIXERS["attention"] | {"window": 5}
MODELS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL, MIXERS["gated_delta_net"]],
    "window": [MIXERS["mamba2"], WINDOW],
    "latent": [MIXERS["mla"], MIXERS["kda"]],
    "parallel": [MIXERS["parallel"] | {"attention": WINDOW}, MIXERS["attention_meta"]],
    "retrieval": [MIXERS["retrieval"] | {"base": WINDOW, "chunk": 4}, FULL],
}


def model_of(name: str) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": mixer, "mlp_size": 0} for mixer in MODELS[name]]
    config = RecurrentConfig(vocab_size=40, hidden_size=32, layers=layers, initializer_range=0.2)
    return RecurrentLM(config).double().eval()


def segments_of(model: RecurrentLM, rows: int) -> CapturedSegments:
    segments = CapturedSegments(model, rows, (SHORT, LONG), ROOM)
    segments.rests = EAGER_FIRST
    return segments


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_segments_equal_one_pass(name: str) -> None:
    model = model_of(name)
    segments = segments_of(model, 2)
    for seed, length in enumerate((ROOM, 2 * LONG + 3, SHORT, 5)):  # long before short: nothing of it may be left
        ids = text(2, length + 4, seed)
        logits, state = read_prompt(model, segments, ids[:, :length], None)
        expected = model(ids[:, :length])
        torch.testing.assert_close(logits, expected.logits[:, -1])
        after = expected.past_key_values
        assert torch.equal(state.position, after.position) and state.length == after.length
        for found, layer in zip(state.layers, after.layers, strict=True):
            assert found.keys() == layer.keys()
            for key in layer:
                torch.testing.assert_close(found[key], layer[key])
        # What is read next, in a pass and in a step.
        whole = model(ids).logits[:, length:]
        torch.testing.assert_close(model(ids[:, length:], past_key_values=state).logits, whole)
        step = DecodingStep(model, 2, torch.float64, fused=False, room=ROOM + 4)
        step.load(state)
        step.ids.copy_(ids[:, length])
        torch.testing.assert_close(step(), whole[:, 0])


def test_a_graph_is_for_one_place_of_a_prompt() -> None:
    hybrid, recurrent = segments_of(model_of("full"), 1), CapturedSegments(model_of("full"), 1, (SHORT, LONG), ROOM)
    assert [kind for kind, _ in hybrid._pieces(LONG + SHORT - 1)] == [Kind(LONG, False), Kind(SHORT, True, LONG)]
    recurrent.caches.any = False
    assert [kind for kind, _ in recurrent._pieces(LONG + SHORT)] == [Kind(LONG, False), Kind(SHORT, False)]
    with pytest.raises(ValueError, match=f"room for {ROOM}"):
        hybrid._pieces(ROOM + 1)


@torch.no_grad()
def test_a_prompt_is_read_in_segments_where_it_may_be() -> None:
    model = model_of("window")
    ids = text(1, 40)
    found = read_captured(model, ids, None)
    assert found is not None
    torch.testing.assert_close(found[0], model(ids).logits[:, -1])
    with pytest.raises(ValueError, match="begin with the first token"):
        read_prompt(model, captured_segments(model, 1, 40), ids, found[1])


@pytest.mark.parametrize("name", MODELS)
def test_segments_never_wait_for_values(name: str) -> None:
    """A number that is read back would break off the recording of a graph."""
    segments = segments_of(model_of(name), 2)
    with fixed_shapes(), NoValues():
        for kind in (Kind(LONG, False), Kind(LONG, False, LONG), Kind(SHORT, True), Kind(SHORT, True, LONG)):
            segments._run(kind)
