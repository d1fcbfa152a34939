"""Progress bars: a terminal is drawn over, a log keeps every drawing."""

from __future__ import annotations

import io
import sys

import pytest

from longrecall.progress import drawing_interval
from longrecall.training.logs import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_few_drawings_of_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))  # a second passes whenever anybody asks
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))
    drawings = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = Bar(100, 0, 1, enabled=True)
        for _ in range(100):
            bar.step()
        bar.close()
        assert "100/100" in stream.getvalue()
        drawings.append(stream.getvalue().count("train:"))
    assert drawings[0] > 50 > 20 > drawings[1]
    assert drawing_interval() == 30.0
