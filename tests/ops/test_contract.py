"""What every op promises on every backend, held against its definition in float64: one table, one test a promise."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.ops import products
from longrecall.ops.backends import OPS, why_no_kernels
from tests.ops.contract import OF_THEIR_OWN, TABLE, Inputs, Row, module_and_name

EVERY = [(name, "reference") for name in TABLE] + [(name, other) for name in TABLE for other in TABLE[name].backends]
OTHERS = [pair for pair in EVERY if pair[1] != "reference"]
Check = Callable[[Row, str], None]


def test_every_op_has_a_row() -> None:
    assert {row.op for row in TABLE.values()} | OF_THEIR_OWN == set(OPS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[[Row, str], None]:
    """Skip what cannot run here; make several tiles and chunks of few tokens; fill buffers with NaN."""

    def prepare(row: Row, backend: str) -> None:
        # Where the CPU multiplies bfloat16, products may be in it: test_products.py has those.
        monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", False)
        if backend != "triton":
            return
        if reason := why_no_kernels():
            pytest.skip(reason)
        for constant, value in row.small.items():
            monkeypatch.setattr(*module_and_name(constant), value)
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
        monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))

    return prepare


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **options: Any) -> Tensor:
        made = make(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    return filled


def inputs_of(row: Row, tokens: int, dtype: torch.dtype, rows: int = 2) -> Inputs:
    """The row's tensors as `dtype`, but for those that are always wide."""
    drawn = row.inputs(torch.Generator().manual_seed(tokens), rows, tokens)
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: x.to(wide if name in row.wide else dtype) if x is not None and x.is_floating_point() else x
        for name, x in drawn.items()
    }


def doubled(given: Inputs) -> Inputs:
    return {name: x.double() if x is not None and x.is_floating_point() else x for name, x in given.items()}


def results(row: Row, given: Inputs, backend: str | None, **options: Any) -> tuple[Tensor, ...]:
    made = row.call(**given, backend=backend, **options)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def outcome(row: Row, given: Inputs, backend: str) -> dict[str, Tensor]:
    """Results and the gradients of a fixed random scalar to every input, by name, in float64."""
    leaves = {
        name: x.clone().requires_grad_(row.differentiable) if x is not None and x.is_floating_point() else x
        for name, x in given.items()
    }
    made = results(row, leaves, backend)
    found = {f"result {n}": x for n, x in enumerate(made)}
    if row.differentiable:
        smooth = [x for x in made if x.requires_grad]
        g = torch.Generator().manual_seed(9)
        # Rounded alike on both sides, so that only what is computed differs.
        torch.autograd.backward(smooth, [torch.randn(x.shape, generator=g).bfloat16().to(x) for x in smooth])
        found |= {f"d {name}": x.grad for name, x in leaves.items() if x is not None and x.grad is not None}
    return {name: x.detach().double() if x.is_floating_point() else x for name, x in found.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Norm of each error over the norm; integers are equal."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        if right.is_floating_point():
            assert found[name].shape == right.shape, name
            # What is cut off or never chosen is infinite on both sides.
            finite = right.isfinite()
            assert torch.equal(found[name][~finite], right[~finite]), name
            error = float((found[name] - right)[finite].norm() / right[finite].norm().clamp(min=1e-12))
            assert error <= tolerance, f"{name}: {error:.2g}"
        else:
            assert torch.equal(found[name], right), name


def narrowest(backend: str) -> torch.dtype:
    """The dtype in which a backend is exact but for the order of sums; kernels do not know float64."""
    return torch.float32 if backend == "triton" else torch.float64


def part(row: Row, given: Inputs, begin: int, end: int) -> Inputs:
    """The tokens from `begin` on, before `end`."""
    whole = (*row.timeless, row.state)
    return {name: x if x is None or name in whole else x[:, begin:end] for name, x in given.items()}


@pytest.mark.parametrize(("name", "backend"), OTHERS)
def test_results_and_gradients_are_those_of_the_definition(name: str, backend: str, few: Check) -> None:
    row = TABLE[name]
    few(row, backend)
    for tokens in row.lengths if backend == "triton" else row.plain_lengths:
        given = inputs_of(row, tokens, narrowest(backend))
        expected = outcome(row, doubled(given), "reference")
        same(outcome(row, given, backend), expected, row.tolerance[narrowest(backend)])


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_low_precision_costs_a_few_roundings_and_states_stay_float32(name: str, backend: str, few: Check) -> None:
    row = TABLE[name]
    few(row, backend)
    for dtype in (torch.float16, torch.bfloat16):
        if backend == "triton" and row.state and dtype == torch.float16:
            continue  # as the narrower bfloat16, in which the interpreter takes as long again
        given = inputs_of(row, 20, dtype, rows=1)
        with torch.no_grad():
            made = results(row, given, backend)
        assert {x.dtype for x in made} <= {dtype, torch.float32, torch.int64}
        assert made[-1].dtype == torch.float32 or row.state not in row.wide
        if name != "best_chunks":  # a choice, which a rounding turns
            expected = outcome(row, doubled(given), "reference")
            same(outcome(row, given, backend), expected, row.tolerance[dtype])
            if row.state in row.wide and backend != "triton":
                # The inputs are rounded before both: what is left is float32 arithmetic.
                same({"state": made[-1].double()}, {"state": expected["result 1"]}, 1e-5)


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_inputs_may_lie_anywhere_and_stay_as_they_were(name: str, backend: str, few: Check) -> None:
    """The same bits from tensors with other strides, and without gradients."""
    row = TABLE[name]
    few(row, backend)
    given = inputs_of(row, 20, torch.float32)
    turned = {name: x if x is None else elsewhere(x) for name, x in given.items()}
    found = results(row, given, backend)
    trained = results(row, {n: x.clone().requires_grad_() if trains(row, x) else x for n, x in given.items()}, backend)
    assert all(torch.equal(a, b) for a, b in zip(found, trained, strict=True))
    # torch takes exponentials of numbers side by side several at a time, with another last bit.
    last_bits = 0.0 if backend == "triton" and not row.around else 1e-6
    for one, other in zip(found, results(row, turned, backend), strict=True):
        torch.testing.assert_close(one, other, rtol=last_bits, atol=last_bits)
    assert all(x is None or torch.equal(x, given[name]) for name, x in turned.items())


def trains(row: Row, x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and row.differentiable


def elsewhere(x: Tensor) -> Tensor:
    """The same numbers: rows and tokens the other way round, or every second number of a longer row."""
    if x.dim() > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return torch.stack((x, x), -1)[..., 0]


CARRYING = [(name, backend) for name, backend in EVERY if TABLE[name].state]


@pytest.mark.parametrize(("name", "backend"), CARRYING)
def test_a_state_that_is_handed_over_equals_one_pass(name: str, backend: str, few: Check) -> None:
    row = TABLE[name]
    few(row, backend)
    dtype = narrowest(backend)
    tokens, cuts = (45, (20,)) if backend == "triton" else (70, (1, 20, 64, 69))
    given = inputs_of(row, tokens, dtype)
    *whole, final = results(row, given, backend)
    for cut in cuts:
        *first, middle = results(row, part(row, given, 0, cut), backend)
        *second, last = results(row, part(row, given, cut, tokens) | {row.state: middle}, backend)
        found = {str(n): torch.cat(pair, 1) for n, pair in enumerate(zip(first, second, strict=True))} | {"state": last}
        same(found, {str(n): x for n, x in enumerate(whole)} | {"state": final}, row.tolerance[dtype])


@pytest.mark.parametrize(("name", "backend"), [pair for pair in EVERY if TABLE[pair[0]].packs])
def test_packed_documents_do_not_see_each_other(name: str, backend: str, few: Check) -> None:
    row = TABLE[name]
    few(row, backend)
    cuts = torch.tensor([0, 1, 18, 40])
    given = inputs_of(row, 40, narrowest(backend), rows=1) | {row.state: None}
    packed, finals = results(row, given, backend, cu_seqlens=cuts)
    for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
        # Kernels that are made for many tokens leave few of them to the definition, which is as good here.
        alone, final = results(row, part(row, given, begin, end), "reference")
        found = {"outputs": packed[:, begin:end], "state": finals[n : n + 1]}
        same(found, {"outputs": alone, "state": final}, row.tolerance[narrowest(backend)])


@pytest.mark.parametrize(("name", "backend"), [pair for pair in EVERY if TABLE[pair[0]].masks])
def test_padding_is_as_if_it_were_not_there(name: str, backend: str, few: Check) -> None:
    """At the beginning, in the middle and at the end, whatever it holds."""
    row = TABLE[name]
    few(row, backend)
    given = inputs_of(row, 30, narrowest(backend))
    real = torch.rand(30, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) < 0.7
    real[[0, 29]] = False
    poison = {"x": given["x"].masked_fill(~real[:, None], float("nan"))}
    found, *after = results(row, given | poison, backend, mask=real.expand(2, 30))
    expected, *final = results(row, given | {"x": given["x"][:, real]}, "reference")
    states = [{"after": x[0]} if x else {} for x in (after, final)]
    same({"y": found[:, real]} | states[0], {"y": expected} | states[1], row.tolerance[narrowest(backend)])


@pytest.mark.parametrize(("name", "backend"), [pair for pair in EVERY if not TABLE[pair[0]].flat])
def test_nothing_in_is_nothing_out(name: str, backend: str, few: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows; and no tokens, which leave a state as it is. Plain torch may complete kernels that need some."""
    row = TABLE[name]
    few(row, backend)
    monkeypatch.setenv("LONGRECALL_BACKEND", backend)
    usual = results(row, inputs_of(row, 20, torch.float32), None)
    none = results(row, inputs_of(row, 20, torch.float32, rows=0), None)
    # The first axis that was two rows long is empty now, and no other one is.
    for few_rows, rows in zip(none, usual, strict=True):
        assert few_rows.shape == tuple(0 if n == rows.shape.index(2) else size for n, size in enumerate(rows.shape))
    if row.state:
        given = inputs_of(row, 0, torch.float32)
        out, final = results(row, given, None)
        assert out.shape[:2] == (2, 0) and torch.equal(final, given[row.state])


@pytest.mark.parametrize(("name", "backend"), [(name, other) for name, row in TABLE.items() for other in row.refuses])
def test_what_a_backend_does_not_serve_is_refused(name: str, backend: str, few: Check) -> None:
    row = TABLE[name]
    few(row, backend)
    with pytest.raises(
        UserError, match=f'backend "{backend}" cannot serve this call of {row.op}: .*{row.refuses[backend]}'
    ):
        results(row, inputs_of(row, 20, torch.float32), backend)
