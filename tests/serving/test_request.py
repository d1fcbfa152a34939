"""What a caller sees of a request whose tokens come while it looks, and what it alone has to bear."""

from __future__ import annotations

from typing import Any

import pytest

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.serving.options import COLDEST, RequestOptions
from longrecall.serving.request import STOP, Request


@pytest.mark.parametrize("options", [{"stop": ("b",)}, {"stop_tokens": (ord("b"),)}], ids=str)
def test_what_ends_a_text_is_no_piece_of_it(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The end comes just after a reader was told that it has not come."""
    request = Request([1], RequestOptions(**options), byte_tokenizer())
    coming = list(b"aab")

    def told(request: Request, count: int) -> bool:
        done = request.done
        if coming:
            request.add(coming.pop(0))
        return done

    monkeypatch.setattr(Request, "_wait_beyond", told)
    assert list(request.pieces()) == ["a", "a"]
    assert request.result().text == "aa" and request.finish_reason == STOP


def test_numbers_that_no_logits_can_be_divided_by() -> None:
    for given in ({"temperature": 10**400}, {"repetition_penalty": 10**400}, {"repetition_penalty": 1e-60}):
        with pytest.raises(UserError, match="must be a number from"):
            RequestOptions(**given)  # type: ignore[arg-type]
    assert not RequestOptions(temperature=COLDEST / 2).samples and RequestOptions(temperature=COLDEST).samples
