"""The expressions that connect native and foreign tensors: both directions, shapes, and what has no way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.layout import TensorPlan
from longrecall.models.formats.sources import (
    constant,
    either,
    join,
    reordered,
    repeat_heads,
    reshaped,
    same,
    split,
    squeeze_conv,
    stack,
    transposed,
)
from longrecall.models.formats.weights import SafetensorsWeights


def plan_of(sources: dict[str, Source], shapes: dict[str, tuple[int, ...]], names: tuple[str, ...] = ()) -> TensorPlan:
    chosen = {name: source.chosen(names) for name, source in sources.items()}
    return TensorPlan(shapes, chosen, {name: source.parts(shapes[name]) for name, source in chosen.items()})


def numbers(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors in which no two numbers are equal."""
    found, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return found


def both_ways(plan: TensorPlan) -> dict[str, torch.Tensor]:
    """The native tensors of foreign ones, after writing these back has given the foreign ones again."""
    foreign = numbers(plan.foreign)
    native = {name: plan.assemble(name, lambda names: [foreign[n] for n in names]) for name in plan.shapes}
    assert {name: tuple(tensor.shape) for name, tensor in native.items()} == plan.shapes
    written = dict(plan.foreign_tensors(lambda name: native[name]))
    assert written.keys() == foreign.keys()
    assert all(torch.equal(written[name], foreign[name]) for name in foreign)
    return native


CASES: list[Any] = [
    pytest.param({"a": same("x")}, {"a": (3, 2)}, {"x": (3, 2)}, id="same"),
    pytest.param({"a": same("x").under("block.")}, {"a": (3,)}, {"block.x": (3,)}, id="under"),
    pytest.param({"a": squeeze_conv(same("x"))}, {"a": (6, 4)}, {"x": (6, 1, 4)}, id="convolution"),
    pytest.param({"a": transposed(same("x"))}, {"a": (5, 6, 4)}, {"x": (5, 4, 6)}, id="transposed"),
    pytest.param({"a": reshaped(same("x"), (1, 1, 6))}, {"a": (2, 3)}, {"x": (1, 1, 6)}, id="reshaped"),
    pytest.param({"a": reordered(same("x"), (2, 0, 1))}, {"a": (3, 2)}, {"x": (3, 2)}, id="reordered"),
    pytest.param({"a": repeat_heads(same("x"), 2, 3)}, {"a": (12, 5)}, {"x": (4, 5)}, id="repeated heads"),
    pytest.param(
        {"a": squeeze_conv(repeat_heads(same("x"), 2, 2))}, {"a": (8, 4)}, {"x": (4, 1, 4)}, id="repeated convolution"
    ),
    pytest.param(
        dict(zip("qkv", split("x", (2, 2, 3)), strict=True)),
        {"q": (2, 4), "k": (2, 4), "v": (3, 4)},
        {"x": (7, 4)},
        id="rows",
    ),
    pytest.param(
        {name: squeeze_conv(part) for name, part in zip("qkv", split("x", (2, 2, 3)), strict=True)},
        {"q": (2, 4), "k": (2, 4), "v": (3, 4)},
        {"x": (7, 1, 4)},
        id="rows of a convolution",
    ),
    pytest.param(
        dict(zip("qkvz", split("x", (2, 2, 6, 6), blocks=2), strict=True)),
        {"q": (4, 3), "k": (4, 3), "v": (12, 3), "z": (12, 3)},
        {"x": (32, 3)},
        id="rows in turns",
    ),
    pytest.param(
        dict(zip(("gate", "up"), split("x", (3, 3), dim=1), strict=True)),
        {"gate": (2, 3, 4), "up": (2, 3, 4)},
        {"x": (2, 6, 4)},
        id="stacked gate and up",
    ),
    pytest.param(
        {"a": stack(same(f"{i}.x") for i in range(3))},
        {"a": (3, 2, 4)},
        {f"{i}.x": (2, 4) for i in range(3)},
        id="stack",
    ),
    pytest.param(
        dict(
            zip(
                ("gate", "up"),
                (stack(parts) for parts in zip(*(split(f"{i}.x", (2, 2)) for i in range(3)), strict=True)),
                strict=True,
            )
        ),
        {"gate": (3, 2, 4), "up": (3, 2, 4)},
        {f"{i}.x": (4, 4) for i in range(3)},
        id="stack of halves",
    ),
    pytest.param(
        {"a": join((same("x"), transposed(same("y"))), (2, 3))}, {"a": (5, 4)}, {"x": (2, 4), "y": (4, 3)}, id="join"
    ),
    pytest.param({"a": same("x"), "b": same("x")}, {"a": (2,), "b": (2,)}, {"x": (2,)}, id="shared by two"),
]


@pytest.mark.parametrize(("sources", "shapes", "foreign"), CASES)
def test_both_directions(sources: dict[str, Source], shapes: Any, foreign: dict[str, tuple[int, ...]]) -> None:
    plan = plan_of(sources, shapes)
    assert plan.foreign == foreign
    both_ways(plan)


def test_rows_in_turns_are_those_of_every_block() -> None:
    # Two heads of [q q k]: rows 0 1 | 2 and 3 4 | 5.
    query, key = split("x", (2, 1), blocks=2)
    native = both_ways(plan_of({"q": query, "k": key}, {"q": (4, 1), "k": (2, 1)}))
    assert native["q"].flatten().tolist() == [0, 1, 3, 4]
    assert native["k"].flatten().tolist() == [2, 5]


def test_repeated_heads_are_blocks_beside_one_another() -> None:
    native = both_ways(plan_of({"a": repeat_heads(same("x"), 2, 2)}, {"a": (8,)}))
    assert native["a"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(7)))
def test_any_order_of_rows(order: list[int]) -> None:
    native = both_ways(plan_of({"a": reordered(same("x"), order)}, {"a": (7,)}))
    assert native["a"].tolist() == order


def test_the_spelling_of_the_file_is_used_and_the_first_one_written() -> None:
    stacked = either(stack(same(f"{i}.x") for i in range(2)), same("xs"))
    assert set(plan_of({"a": stacked}, {"a": (2, 3)}).foreign) == {"0.x", "1.x"}
    assert set(plan_of({"a": stacked}, {"a": (2, 3)}, ("xs",)).foreign) == {"xs"}
    # Half of the first alternative is not the first alternative.
    assert set(plan_of({"a": stacked}, {"a": (2, 3)}, ("xs", "0.x")).foreign) == {"xs"}
    wrapped = squeeze_conv(same("new", "old"))
    assert set(plan_of({"a": wrapped}, {"a": (2, 3)}, ("old",)).foreign) == {"old"}


def write_one(source: Source, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(plan_of({"native": source}, {"native": tuple(tensor.shape)}).foreign_tensors(lambda name: tensor))


def test_heads_that_differ_are_named() -> None:
    tensor = torch.zeros(12, 2)
    tensor[10, 1] = 1.0  # the last of the three copies of head 1
    with pytest.raises(
        UserError, match=r'^tensor "native": heads 3 and 5 differ, but the other model has one for both'
    ):
        write_one(repeat_heads(same("x"), 2, 3), tensor)


def test_a_constant_that_has_changed_is_refused() -> None:
    assert write_one(constant(1.0), torch.ones(3)) == {}
    with pytest.raises(UserError, match=r"not all of its numbers are 1, and the other model has no place for them"):
        write_one(constant(1.0), torch.tensor([1.0, 2.0]))


def test_tensors_of_a_shared_one_that_differ_are_named() -> None:
    plan = plan_of({"a": same("x"), "b": same("x")}, {"a": (1,), "b": (1,)})
    native = {"a": torch.zeros(1), "b": torch.ones(1)}
    with pytest.raises(UserError, match=r'"a" and "b" differ, but the other model has "x" for both'):
        dict(plan.foreign_tensors(native.__getitem__))


def test_parts_of_different_types_are_refused() -> None:
    first, second = split("x", (1, 1))
    plan = plan_of({"a": first, "b": second}, {"a": (1,), "b": (1,)})
    native = {"a": torch.zeros(1), "b": torch.ones(1, dtype=torch.bfloat16)}
    with pytest.raises(
        UserError, match=r'"a" and "b" have different types \(float32 and bfloat16\), but "x" holds both'
    ):
        dict(plan.foreign_tensors(native.__getitem__))


@pytest.mark.parametrize(
    ("sources", "shapes", "named"),
    [
        ({"a": split("x", (2, 2))[0]}, {"a": (2,)}, "overlap or leave something out"),
        ({"a": split("x", (2, 2))[0], "b": split("x", (2, 3))[1]}, {"a": (2,), "b": (3,)}, "disagree about its shape"),
        ({"a": split("x", (2, 2))[0]}, {"a": (3,)}, "has 2 rows"),
        ({"a": stack([same("x")])}, {"a": (2, 2)}, "stack up"),
        ({"a": join([same("x")], [3])}, {"a": (2, 2)}, "add up"),
        ({"a": repeat_heads(same("x"), 2, 2)}, {"a": (6,)}, "heads"),
        ({"a": reshaped(same("x"), (4,))}, {"a": (6,)}, "numbers"),
        ({"a": reordered(same("x"), (1, 0))}, {"a": (6,)}, "order"),
    ],
)
def test_a_format_that_contradicts_itself_is_a_mistake(sources: Any, shapes: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_of(sources, shapes)


def test_only_the_file_of_a_tensor_is_opened_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"one": {"0.x": torch.zeros(2), "1.x": torch.ones(2)}, "two": {"y": torch.ones(2)}}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    weights = SafetensorsWeights(tmp_path, dict.fromkeys((f"{name}.safetensors" for name in files), None))
    opened: list[str] = []
    from longrecall.models.formats import weights as module

    original = module.safe_open
    monkeypatch.setattr(module, "safe_open", lambda path, **options: opened.append(path) or original(path, **options))
    plan = plan_of({"a": stack(same(f"{i}.x") for i in range(2)), "b": same("y")}, {"a": (2, 2), "b": (2,)})
    assert plan.assemble("a", weights.read).tolist() == [[0, 0], [1, 1]]
    assert opened == [str(tmp_path / "one.safetensors")]
