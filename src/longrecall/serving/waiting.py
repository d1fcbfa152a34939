"""Requests that wait for a slot of an engine, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict

from longrecall.serving.reading import Job
from longrecall.serving.request import Request

ARRIVAL, LONGEST = "arrival", "longest"
ORDERS = (ARRIVAL, LONGEST)
"""The first that came, or the one that asks for the most new tokens."""


class Waiting:
    """Jobs in the order in which they came, by their requests."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.jobs: OrderedDict[Request, Job] = OrderedDict()

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job) -> None:
        """It waits from now on."""
        self.jobs[job.request] = job

    def drop(self, request: Request) -> None:
        """It waits no longer, if it did."""
        self.jobs.pop(request, None)

    def next(self) -> Job:
        """Take out the one whose turn it is; of equals the first that came."""
        if self.order == ARRIVAL:
            return self.jobs.popitem(last=False)[1]
        return self.jobs.pop(max(self.jobs, key=lambda request: request.options.max_new_tokens))
