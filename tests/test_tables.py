"""Tables in which equal rows are one."""

from __future__ import annotations

from longrecall.tables import aligned, grouped, in_runs


def test_runs_of_numbers() -> None:
    assert in_runs([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert in_runs([]) == "" and in_runs([3]) == "3"


def test_equal_rows_are_one_with_their_numbers() -> None:
    assert grouped([("a", "1"), ("b", "2"), ("a", "1"), ("a", "1")]) == [("0,2-3", "a", "1"), ("1", "b", "2")]


def test_many_numbers_go_into_lines_of_their_own() -> None:
    rows = [("even", "1") if row % 2 == 0 else ("odd", "2") for row in range(52)]
    table = aligned(grouped(rows), left=2)
    assert table[0] == "0,2,4,6,8,10,12,14,16,18,20,22,  even  1"
    assert table[1] == "24,26,28,30,32,34,36,38,40,42,"
    assert table[2] == "44,46,48,50"
    assert len(table) == 6 and all(len(line) <= 40 for line in table)
