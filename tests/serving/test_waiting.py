"""Requests that wait for a slot: whose turn it is, among many as fast as among few."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any, cast

import pytest

from longrecall.serving.options import RequestOptions
from longrecall.serving.reading import Job
from longrecall.serving.request import Request
from longrecall.serving.waiting import LONGEST, ORDERS, Waiting


class Asked(Request):
    """A request that counts how often somebody looks at what it asks for."""

    looks = 0

    @property
    def options(self) -> RequestOptions:
        type(self).looks += 1
        return self._options

    @options.setter
    def options(self, options: RequestOptions) -> None:
        self._options = options


def waiting_of(order: str, lengths: list[int]) -> tuple[Waiting, list[Request]]:
    waiting = Waiting(order)
    requests: list[Request] = [Asked([1], RequestOptions(max_new_tokens=length)) for length in lengths]
    for request in requests:
        waiting.add(cast(Job, Made(request)))
    return waiting, requests


class Made:
    """Of a job, what the queue looks at."""

    def __init__(self, request: Request) -> None:
        self.request: Any = request


@pytest.mark.parametrize("order", ORDERS)
def test_turns(order: str) -> None:
    """By length or as they came, of equals the first that came; who has left is passed over."""
    chance = random.Random(0)
    lengths = [chance.randint(2, 9) for _ in range(60)]
    waiting, requests = waiting_of(order, lengths)
    gone = chance.sample(range(60), 15)
    for index in gone:
        waiting.drop(requests[index])
        waiting.drop(requests[index])
    expected = [index for index in range(60) if index not in gone]
    if order == LONGEST:
        expected.sort(key=lambda index: -lengths[index])
    assert len(waiting) == 45
    assert [waiting.next().request for _ in range(45)] == [requests[index] for index in expected]
    assert not len(waiting)


def test_the_next_of_many_is_found_at_once() -> None:
    """The engine's thread asks between two steps of a millisecond: it cannot look at ten thousand requests."""
    waiting, requests = waiting_of(LONGEST, list(range(2, 502)))
    for _ in requests:
        waiting.next()
    assert Asked.looks <= 2 * len(requests)


@pytest.mark.parametrize("order", ORDERS)
def test_who_has_left_is_let_go(order: str) -> None:
    """Clients that give up leave nothing behind, though somebody waits on before whom they would never come."""
    waiting, requests = waiting_of(order, [9] + [2] * 300)
    first, *others = map(weakref.ref, requests)
    while len(requests) > 1:
        waiting.drop(requests.pop())
    gc.collect()
    assert sum(other() is not None for other in others) < 4
    assert len(waiting) == 1 and waiting.next().request is first()
