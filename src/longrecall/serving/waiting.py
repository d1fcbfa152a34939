"""Requests that wait for a slot of an engine, and whose turn it is."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from longrecall.serving.reading import Job
from longrecall.serving.request import Request

ARRIVAL, LONGEST = "arrival", "longest"
ORDERS = (ARRIVAL, LONGEST)
"""The first that came, or the one that asks for the most new tokens."""


class Waiting:
    """Jobs by their requests, and whose turn it is: found as fast among many as among few."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.jobs: dict[Request, Job] = {}
        self.turns: list[tuple[int, int, Request]] = []
        """A heap: the next one first. Who has left stays in it for a while."""
        self._came = count()

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job) -> None:
        """It waits from now on."""
        request = job.request
        self.jobs[request] = job
        first = -request.options.max_new_tokens if self.order == LONGEST else 0
        # Of equals the first that came; requests themselves are never compared.
        heappush(self.turns, (first, next(self._came), request))

    def drop(self, request: Request) -> None:
        """It waits no longer, if it did."""
        if self.jobs.pop(request, None) is not None and len(self.turns) > 2 * len(self.jobs):
            self.turns = [turn for turn in self.turns if turn[2] in self.jobs]
            heapify(self.turns)

    def next(self) -> Job:
        """Take out the one whose turn it is."""
        while True:
            *_, request = heappop(self.turns)
            job = self.jobs.pop(request, None)
            if job is not None:
                return job
