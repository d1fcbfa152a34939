"""Answering requests: an engine that decodes many sequences at once, a bank of states on disk, a server before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrecall.late_names import late_names

if TYPE_CHECKING:
    from longrecall.serving.bank import Bank
    from longrecall.serving.engine import Engine
    from longrecall.serving.options import RequestOptions
    from longrecall.serving.request import Overloaded, Request, Result

__all__ = ["Bank", "Engine", "Overloaded", "Request", "RequestOptions", "Result"]

_HOMES = {
    "Bank": "longrecall.serving.bank",
    "Engine": "longrecall.serving.engine",
    "Overloaded": "longrecall.serving.request",
    "Request": "longrecall.serving.request",
    "RequestOptions": "longrecall.serving.options",
    "Result": "longrecall.serving.request",
}

__getattr__ = late_names(__name__, _HOMES)
