"""The divergence from a teacher: its definition in float64, chunk by chunk, exactly 0 where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longrecall.models.distillation import Closeness, Predictions, compare, divergence, relative_error
from longrecall.models.logits import Head, LogitScale

WIDTH, VOCABULARY, TOKENS = 6, 11, 13


def predictions(seed: int, dtype: torch.dtype = torch.float64, scale: LogitScale = LogitScale()) -> Predictions:  # noqa: B008
    generator = torch.Generator().manual_seed(seed)
    head = Head(WIDTH, VOCABULARY, bias=False).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator))
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    return Predictions(hidden, head, scale)


def definition(student: Predictions, teacher: Predictions, how: Closeness) -> Tensor:
    """The sum over outcomes of p log(p / q), with probabilities as they are: no logarithms of sums."""
    own, aim = ((each.logits(each.hidden) / how.temperature).softmax(-1) for each in (student, teacher))
    aim = aim.detach()
    if how.top_k is not None and how.top_k < VOCABULARY:
        best = aim.argsort(-1, descending=True)[:, : how.top_k]
        kept = torch.zeros_like(aim, dtype=torch.bool).scatter(-1, best, True)
        own, aim = (torch.cat([x * kept, (x * ~kept).sum(-1, keepdim=True)], -1) for x in (own, aim))
        terms = torch.where(aim > 0, aim * (aim.clamp(min=1e-300) / own.clamp(min=1e-300)).log(), 0)
    else:
        terms = aim * (aim / own).log()
    return terms.sum() * how.temperature**2


def slopes(total: Tensor, student: Predictions) -> tuple[Tensor, ...]:
    # Twice the loss has twice the gradient: what comes from above is multiplied in.
    return torch.autograd.grad(2 * total, [student.hidden, *student.head.parameters()])


@pytest.mark.parametrize(
    "how", [Closeness(), Closeness(2.5), Closeness(1.0, 3), Closeness(0.7, VOCABULARY - 1), Closeness(1.0, VOCABULARY)]
)
@pytest.mark.parametrize("scale", [LogitScale(), LogitScale(0.5, 3.0)])
def test_value_and_gradient_are_those_of_the_definition(how: Closeness, scale: LogitScale) -> None:
    student, teacher = predictions(0, scale=scale), predictions(1)
    expected = definition(student, teacher, how)
    for numbers in (1, 4 * VOCABULARY, 10**6):  # tokens one by one, in fours, all at once
        found = divergence(student, teacher, how, numbers)
        # float64 rounding, over a sum of 143 terms.
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for own, wanted in zip(slopes(found, student), slopes(expected, student), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)
        expected = definition(student, teacher, how)
    assert teacher.hidden.grad is None and teacher.head.weight.grad is None


def test_all_tokens_but_one_are_all_tokens() -> None:
    student, teacher = predictions(0), predictions(1)
    whole, most, all_ = (divergence(student, teacher, Closeness(1.0, k)) for k in (None, VOCABULARY - 1, 99))
    # The rest is one token: only the order of the sum differs.
    torch.testing.assert_close(most, whole, rtol=1e-12, atol=0)
    assert torch.equal(all_, whole)
    # Tokens that count as one hide how they differ among themselves.
    assert divergence(student, teacher, Closeness(1.0, 2)) < whole


@pytest.mark.parametrize("how", [Closeness(), Closeness(2.0, 3)])
def test_like_predictions_have_neither_loss_nor_gradient(how: Closeness) -> None:
    student, teacher = (predictions(0, torch.float32) for _ in range(2))
    total = divergence(student, teacher, how)
    assert total.item() == 0.0 and total.dtype == torch.float32
    assert all(not slope.any() for slope in slopes(total, student))


@pytest.mark.parametrize("how", [Closeness(), Closeness(1.0, 1)])
def test_a_student_far_too_sure_of_itself(how: Closeness) -> None:
    """What it holds impossible, by more than a float32 number can say, has the slope of float64."""
    student, teacher = torch.tensor([[200.0, 0.0, 0.0, 0.0]]), torch.tensor([[3.0, 0.0, 0.0, 0.0]])
    found, expected = (compare(student.to(x), teacher.to(x), how) for x in (torch.float32, torch.float64))
    # Rounding of float32: logarithms of up to 200.
    torch.testing.assert_close([x.double() for x in found], list(expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_small_factor_keeps_its_digits(device: str) -> None:
    """Slopes of bfloat16 are one by one rounded, not what multiplies all of them."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    student, teacher = (predictions(seed, torch.bfloat16) for seed in (0, 1))
    student, teacher = (each._replace(hidden=each.hidden.detach().to(device)) for each in (student, teacher))
    student, teacher = (each._replace(head=each.head.to(device)) for each in (student, teacher))
    total = divergence(student._replace(hidden=student.hidden.requires_grad_()), teacher, Closeness())
    # Between two numbers of bfloat16, which are 1/256 apart there.
    factor = torch.tensor(1 + 1 / 512 + 1 / 2048, device=device)
    one, more = (
        torch.autograd.grad(total, student.hidden, x, retain_graph=True)[0].double()
        for x in (torch.ones_like(factor), factor)
    )
    assert torch.equal(more, (one * factor.double()).to(torch.bfloat16).double())


def test_what_has_no_gradient_and_no_tokens() -> None:
    student, teacher = predictions(0), predictions(1)
    student.head.requires_grad_(False)
    (slope,) = torch.autograd.grad(divergence(student, teacher, Closeness()), [student.hidden])
    (wanted,) = torch.autograd.grad(definition(student, teacher, Closeness()), [student.hidden])
    torch.testing.assert_close(slope, wanted, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert not divergence(student, teacher, Closeness()).requires_grad
    none = divergence(
        student._replace(hidden=student.hidden[:0]), teacher._replace(hidden=teacher.hidden[:0]), Closeness()
    )
    assert none.item() == 0.0


def test_a_head_is_called() -> None:
    """An adapter around the head takes part, and gets a gradient of its own."""
    student, teacher = predictions(0), predictions(1)
    adapted = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64), student.head)
    student = student._replace(head=adapted)
    pairs = zip(
        slopes(divergence(student, teacher, Closeness()), student),
        slopes(definition(student, teacher, Closeness()), student),
        strict=True,
    )
    for own, wanted in pairs:
        torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)


def test_streams_are_compared_by_their_length() -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    found = relative_error([one, 3 * two], [two, two])
    expected = ((one - two).square().sum(1) / two.square().sum(1)).sum() / 2 + 5 * 4 / 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert relative_error([one], [one]) == 0
