"""A task of lm-evaluation-harness as a task of ours: its name, its options, where its definition lies."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, ClassVar

from longrecall.errors import UserError, did_you_mean
from longrecall.installing import install_command
from longrecall.tasks.encoding import Cell

PREFIX = "lm_eval:"
"""What the names of harness tasks begin with in ``--tasks`` and in result files."""

_NAME = re.compile(r"^(task|group|tag)\s*:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
_LISTED = re.compile(r"^tag\s*:\s*\n((?:\s*-\s*\S+\s*\n)+)", re.MULTILINE)


def require_lm_eval() -> None:
    """Raise `UserError` when lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"tasks named {PREFIX}... need lm-evaluation-harness, which is not installed; "
            f"install it with: {install_command('lm-eval')}"
        )


@dataclass(frozen=True)
class HarnessTask:
    """A task or a group of lm-evaluation-harness, by its name there after ``lm_eval:``.

    `shots`: demonstrations before each question; None takes the task's own number. `max_length`: tokens that the model
    sees at most, earlier ones are cut off, and texts whose every token is scored are cut into windows of it, as the
    harness does; None reads everything. `data`: a folder with YAML files of tasks (``--include_path`` of lm_eval),
    which go before the harness's own. Documents are the first ones of the task, as with the harness's ``--limit``.
    """

    name: str
    shots: int | None = None
    max_length: int | None = None
    data: str = ""

    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check name and options; raises `UserError`, with the nearest names for an unknown one."""
        require_lm_eval()
        if self.shots is not None and self.shots < 0:
            raise UserError(f"{self.name}: shots must not be negative, got {self.shots}")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"{self.name}: max_length must be at least 2 tokens, got {self.max_length}")
        if self.data and not Path(self.data).is_dir():
            raise UserError(f"{self.name}: {self.data} is not a folder; data= takes a folder with YAML files of tasks")
        definition_file(self.harness_name, self.data)

    @classmethod
    def create(cls, name: str, **options: Any) -> HarnessTask:
        """Return the task `name` with its options; an unknown option raises `UserError` with the nearest."""
        known = cls.option_names()
        for option in options:
            if option not in known:
                raise UserError(
                    f'task {name} has no option "{option}"; it has {", ".join(known)}.{did_you_mean(option, known)}'
                )
        return cls(name, **options)

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of all options."""
        return [field.name for field in fields(cls) if field.name != "name"]

    @property
    def harness_name(self) -> str:
        """The name in the harness."""
        return self.name.removeprefix(PREFIX)

    def cells(self, lengths: Sequence[int]) -> Sequence[Cell]:
        """Return the one cell; most harness tasks have no lengths."""
        return [{}]

    def data_facts(self) -> Mapping[str, str]:
        """Return what decides the questions beside the options: the harness's version and the task's definition."""
        path = definition_file(self.harness_name, self.data)
        facts = {"lm_eval": installed_version("lm_eval")}
        if path is not None:
            facts["definition"] = hashlib.sha256(path.read_bytes()).hexdigest()
        return facts


def definition_file(name: str, data: str = "") -> Path | None:
    """Return the YAML file that defines the harness task or group `name`; None for a tag.

    `data`: a folder that goes before the harness's own. Raises `UserError`, with the nearest names, when none does.
    """
    roots = [Path(data)] if data else []
    for root in [*roots, _own_tasks()]:
        names = _definitions(root)
        if name in names:
            return names[name]
    known = [known for root in [*roots, _own_tasks()] for known in _definitions(root)]
    raise UserError(
        f'lm-evaluation-harness has no task "{name}".{did_you_mean(name, known, most=3)} '
        "All names: lm_eval ls tasks; your own: --option "
        f"{PREFIX}{name}.data=FOLDER"
    )


def _own_tasks() -> Path:
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise UserError("lm-evaluation-harness is installed without its files; install it again")
    return Path(found.origin).parent / "tasks"


@lru_cache(maxsize=8)
def _definitions(root: Path) -> dict[str, Path | None]:
    """Return the names that YAML files under `root` define; far faster than the harness's index, which parses them."""
    found: dict[str, Path | None] = {}
    for path in sorted(root.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for kind, name in _NAME.findall(text):
            # `task:` of a group is a list; its first dash is no name.
            if name != "-":
                found.setdefault(name, None if kind == "tag" else path)
        for block in _LISTED.findall(text):
            for tag in re.findall(r"-\s*(\S+)", block):
                found.setdefault(tag, None)
    return found
