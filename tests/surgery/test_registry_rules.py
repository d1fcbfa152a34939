"""The registry polices itself, and hands each init its own complete options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longrecall.surgery import registry
from longrecall.surgery.method import Method, Option
from longrecall.surgery.methods.merge_heads import METHOD
from longrecall.surgery.registry import METHODS, register


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def method(name: str = "new", inits: tuple[str, ...] = ("preserve",), options: tuple[Option, ...] = ()) -> Method:
    return Method(name, "a test", ("gla",), inits, options, METHOD.plan, METHOD.transform)


def test_a_method_joins_once() -> None:
    assert register(method()) is registry.find_method("new")
    with pytest.raises(ValueError, match="registered twice"):
        register(method())


@pytest.mark.parametrize("inits", [(), ("preserve", "keep")])
def test_unknown_or_no_inits_are_refused(inits: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="unknown or no inits"):
        register(method(inits=inits))
    option = Option("size", int, 1, inits, "help")
    with pytest.raises(ValueError, match="unknown or no inits"):
        register(method(options=(option,)))


def test_an_option_is_named_once_and_its_default_must_pass_its_own_check() -> None:
    option = Option("size", int, 1, ("preserve",), "help")
    with pytest.raises(ValueError, match="option twice"):
        register(method(options=(option, option)))
    with pytest.raises(ValueError, match="too small"):
        register(method(options=(Option("size", int, 1, ("preserve",), "help", least=2),)))
    assert "new" not in METHODS


def test_defaults_are_written_out_per_init() -> None:
    grow = METHODS["grow_state"]
    assert grow.check_options("preserve", {}) == {"factor": 4, "fresh": "measured", "noise_scale": 1.0}
    noise = {"fresh": "usual", "noise_scale": 1.0, "shrink": 0.5, "perturb_conv": False}
    assert grow.check_options("perturb", {}) == {"factor": 4, **noise}
    assert grow.check_options("inherit", {"state_dim": 64}) == {"state_dim": 64}
    assert grow.check_options("preserve", {"factor": None, "noise_scale": 2})["noise_scale"] == 2.0
