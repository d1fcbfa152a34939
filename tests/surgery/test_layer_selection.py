from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.errors import UserError
from longrecall.surgery.layer_selection import select_layers


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("every:6", (0, 6, 12, 18)),
        ("every:1", tuple(range(24))),
        ("every:100", (0,)),
        ("first:3", (0, 1, 2)),
        ("all", tuple(range(24))),
        ("0,6,12", (0, 6, 12)),
        (" 12, 0 ,6", (0, 6, 12)),
        ("5", (5,)),
        ([3, 1], (1, 3)),
    ],
)
def test_selections(selection: str | list[int], expected: tuple[int, ...]) -> None:
    assert select_layers(selection, 24) == expected


@pytest.mark.parametrize(
    ("selection", "cause"),
    [
        ("every:0", "at least 1"),
        ("every:-2", "at least 1"),
        ("first:0", "at least 1"),
        ("first:25", "only 24 layers"),
        ("every:x", "not a whole number"),
        ("every:", "not a whole number"),
        ("each:2", "not a whole number"),
        ("24", "out of range"),
        ("-1", "out of range"),
        ("1,1", "more than once"),
        ("1,,2", "not a whole number"),
        ("", "not a whole number"),
        ("1.5", "not a whole number"),
        ("1_0", "not a whole number"),
        ("\u0661", "not a whole number"),
        ([], "nothing chosen"),
        ([True], "not a layer index"),
        ([1.0], "not a layer index"),
    ],
)
def test_nonsense_is_refused_with_its_cause(selection: str | list[int], cause: str) -> None:
    with pytest.raises(UserError, match=cause) as caught:
        select_layers(selection, 24)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 80), st.integers(1, 80))
def test_every_is_statex_uniform_strategy(step: int, count: int) -> None:
    chosen = select_layers(f"every:{step}", count)
    assert chosen[0] == 0 and all(later - earlier == step for earlier, later in itertools.pairwise(chosen))
    assert chosen[-1] + step >= count
    assert select_layers(",".join(map(str, chosen)), count) == chosen


def test_a_hybrid_counts_the_layers_that_fit() -> None:
    hybrid = (0, 1, 2, 4, 5, 6)  # every fourth layer is attention
    assert select_layers("all", 8, hybrid) == hybrid
    assert select_layers("every:3", 8, hybrid) == (0, 4)  # 0, 3, 6 would take layer 3
    assert select_layers("every:2", 8, hybrid) == (0, 2, 4, 6)  # all of them fit
    assert select_layers("first:4", 8, hybrid) == (0, 1, 2, 4)
    assert select_layers("0,3", 8, hybrid) == (0, 3)  # named by hand: the method says what does not fit
    assert select_layers("all", 8, ()) == tuple(range(8))
