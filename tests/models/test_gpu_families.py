"""Every family on a GPU: prompts in captured segments, captured steps, a training step; against the same on a CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import longrecall
from longrecall.inference.eligibility import why_no_graph, why_no_room
from longrecall.inference.reading import read_prompt
from longrecall.inference.segments import EAGER_FIRST, CapturedSegments
from longrecall.inference.step import DecodingStep
from tests.models.families.case import Case, filled
from tests.models.test_families import FIRST, ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPT, MORE, ROOM = 300, 4, 512
SEGMENTS = (64, 256)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("case", FIRST, ids=str)
@torch.no_grad()
def test_captured_work_equals_the_cpu(case: Case, rows: int, tmp_path: Path) -> None:
    filled(case).save_pretrained(tmp_path)
    model = longrecall.load(tmp_path)
    tokens = ids(rows, PROMPT + MORE)
    expected = model(tokens).logits[:, PROMPT - 1 :]
    model.cuda()
    assert why_no_graph(model) is None and why_no_room(model, PROMPT) is None
    segments = CapturedSegments(model, rows, SEGMENTS, ROOM)
    segments.rests = EAGER_FIRST
    prompt = tokens[:, :PROMPT].cuda()
    step = DecodingStep(model, rows, room=ROOM)
    step.capture()
    for _ in range(3):  # the second place of a prompt is read eagerly once, then captured, then replayed
        logits, state = read_prompt(model, segments, prompt, None)
        found = [logits.clone()]
        step.load(state)
        for column in range(PROMPT, PROMPT + MORE):
            step.ids.copy_(tokens[:, column].cuda())
            found.append(step().clone())
        # float32 in another order, through hundreds of tokens of models with large random weights.
        torch.testing.assert_close(torch.stack(found, 1).cpu(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_gradients_equal_the_cpu(case: Case, tmp_path: Path) -> None:
    filled(case).save_pretrained(tmp_path)
    model, tokens = longrecall.load(tmp_path), ids(2, 70)
    other = copy.deepcopy(model).cuda()
    for one, text in ((model, tokens), (other, tokens.cuda())):
        one(text, labels=text).loss.backward()
    for (name, found), expected in zip(other.named_parameters(), model.parameters(), strict=True):
        if expected.grad is not None and found.grad is not None:
            difference = (found.grad.cpu() - expected.grad).norm() / expected.grad.norm().clamp(min=1e-6)
            assert difference < 2e-3, (name, float(difference))
