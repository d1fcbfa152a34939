"""What callers promise to ops, and how the environment is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from longrecall.context import ContextGroup, context_parallel
from longrecall.errors import UserError
from longrecall.ops import execution

SOURCE = Path(__file__).parents[2] / "src" / "longrecall"

MAY_READ_THE_ENVIRONMENT = {
    "ops/execution.py": "what ops are told by it",
    "evaluation/parallel.py": "the variables of a distributed launch",
    "models/compiling.py": "CXX, the compiler that torch.compile looks for",
    "evaluation/harness/entries.py": "sets a variable of lm-eval's for as long as a task is built",
    "evaluation/harness/files.py": "asks where the user's cache is",
    "errors.py": "the rank, as one process of a launch speaks for all",
    "training/prefetch.py": "sets a variable of tokenizers' for as long as processes are started",
    "training/parallel/launcher.py": "what torchrun and accelerate launch say",
    "cli/main.py": "whether a shell asks for completions",
    "cli/completion.py": "what was typed so far",
    "demo/processes.py": "hands it on to a process of its own",
}


def reads_the_environment(source: str) -> bool:
    """Whether a file names `os.environ` or `os.getenv`, however it imported them."""
    if "environ" not in source and "getenv" not in source:
        return False  # most files: to parse all of them takes seconds
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "os" for alias in node.names
    }
    return bool({"environ", "environb", "getenv"} & (names | imported))


def test_the_environment_is_read_in_one_place() -> None:
    assert reads_the_environment("import os\nos.getenv('A')") and reads_the_environment("from os import environ")
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    reading = {name for name, path in files.items() if reads_the_environment(path.read_text(encoding="utf-8"))}
    assert reading == set(MAY_READ_THE_ENVIRONMENT)


def test_promises_hold_inside_their_block_and_side_by_side() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert execution.current() is execution.PLAIN
    with execution.prefetching(), execution.padding_at_the_end(mask):
        assert execution.may_prefetch() and not execution.states_are_unread()
        with execution.unread_states(), execution.fixed_shapes():
            now = execution.current()
            assert now.prefetch and now.unread_states and now.fixed_shapes
            assert now.padding is not None and now.padding.mask is mask
            assert execution.shapes_are_fixed(torch.device("cpu"))
            read_now = execution.as_states_are_read_now(execution.states_are_unread)
        assert not execution.states_are_unread()
        # As a checkpoint's backward calls it, when the block is over.
        assert read_now() and not execution.states_are_unread()
    assert execution.current() is execution.PLAIN
    with pytest.raises(AttributeError):
        execution.PLAIN.prefetch = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("LONGRECALL_GLUON", execution.gluon_wanted), ("LONGRECALL_EARLY", execution.early_launches_wanted)],
)
def test_switches_have_one_rule(name: str, asked: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(asked)
    for value, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv(name, value)
        assert asked() is wanted
    monkeypatch.delenv(name)
    assert asked() is True
    monkeypatch.setenv(name, "off")
    with pytest.raises(UserError, match=f'{name} must be 0 or 1, not "off"'):
        asked()


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_BACKEND", "")
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setenv("CUDA_HOME", "")
    assert execution.backend_from_environment() is None
    assert not execution.interpreting_triton()
    assert "" not in execution.cuda_homes()
    # The words that Triton takes for yes.
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    assert execution.interpreting_triton()


def test_what_is_read_whole_is_read_whole_again() -> None:
    """In a checkpoint's backward inside of a block that cuts texts over ranks, as memory tokens are."""
    again = execution.as_states_are_read_now(execution.context)
    group = ContextGroup(object(), 1, 2)
    with context_parallel(group):
        assert execution.context() is group and again() is None
        cut = execution.as_states_are_read_now(execution.context)
    assert execution.context() is None and cut() is group
