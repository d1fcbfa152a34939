"""What `longrecall doctor` finds out, as plain data, and as the lines that a person reads."""

from __future__ import annotations

import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import longrecall
from longrecall.doctor import packages
from longrecall.doctor.packages import PURPOSES, Package, in_another_process, why_no_imports
from longrecall.installing import install_command
from longrecall.tables import aligned
from longrecall.units import format_bytes
from longrecall.version import __version__

WIDTH = 120
"""Characters of a line at most, where its words allow it."""

_UNTRIED = "dev"
"""The extra whose packages are tools that are run, not imported."""
_MODEL = "longrecall.models.recurrent_lm"
"""What every verb that runs a model imports."""
_MACHINE = "from longrecall.doctor import machine; import json; print(json.dumps(machine.describe_machine()))"


def examine() -> dict[str, Any]:
    """Return what is installed, what this machine has, and under ``"problems"`` why the base does not work, if so.

    Every package is imported in another process, so that one which ends Python does not end this one.
    """
    found = packages.look_up()
    tried = [one.module for one in found or () if one.module is not None and one.extra != _UNTRIED]
    reasons = why_no_imports([*tried, _MODEL])
    found = None if found is None else [_with_import(one, reasons) for one in found]
    machine, no_machine = _machine() if reasons.get("torch") is None else (None, None)
    problems = [*_problems(found or ()), *([no_machine] if no_machine else [])]
    if reasons[_MODEL] is not None and not problems:
        problems.append(f"longrecall's own models: {reasons[_MODEL]}")
    return {
        "longrecall": {
            "version": __version__,
            "metadata": packages.metadata_version(),
            "place": str(Path(longrecall.__file__).parent),
        },
        "python": {"version": platform.python_version(), "place": sys.executable},
        "packages": None if found is None else [asdict(one) for one in found],
        "extras": None if found is None else {name: PURPOSES.get(name, "") for name in packages.extras()},
        "machine": machine,
        "problems": problems,
    }


def _with_import(one: Package, reasons: dict[str, str | None]) -> Package:
    reason = None if one.module is None else reasons.get(one.module)
    return one if one.trouble is not None or reason is None else replace(one, trouble=reason)


def _machine() -> tuple[dict[str, Any] | None, str | None]:
    lines, reason = in_another_process(_MACHINE, (), packages.SECONDS)
    if reason is not None or not lines:
        return None, f"torch and this machine: {reason or 'no answer'}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found, None


def _problems(found: Sequence[Package]) -> list[str]:
    """Why the base does not work, a line for each package."""
    lines = []
    for one in found:
        if one.extra is None and one.version is None:
            lines.append(f"{one.name} is not installed; {install_command(one.name)}")
        elif one.extra is None and one.trouble is not None:
            lines.append(f"{one.name} {one.version}: {one.trouble}; {install_command(one.name)}")
    return lines


def as_text(facts: dict[str, Any]) -> str:
    """Return the data of `examine` as lines."""
    ours, python, machine = facts["longrecall"], facts["python"], facts["machine"]
    rows = [("longrecall", f"{ours['version']} in {ours['place']}")]
    if ours["metadata"] not in (None, ours["version"]):
        rows.append(("", f"its metadata says {ours['metadata']}; install it again"))
    rows.append(("python", f"{python['version']} at {python['place']}"))
    lines = [*aligned([*rows, *(_machine_rows(machine) if machine else ())], left=2), "", *_package_lines(facts)]
    if machine is not None:
        lines += ["", "ops and what computes them here (for every layer of a model: longrecall info --backends CKPT)"]
        lines += _op_lines(machine["ops"])
        lines += ["", *_folder_lines(machine["folders"])]
    return "\n".join([*map(_wrapped, lines), "", *(facts["problems"] or ["The base works."])])


def _wrapped(line: str) -> str:
    """A line in several, where it is long; those after the first are indented more."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    folded = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(folded)


def _machine_rows(machine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = machine["memory_bytes"]
    size = "" if memory is None else f", {format_bytes(memory)} of memory"
    yield "machine", f"{machine['platform']}, {machine['processors']} processors{size}"
    torch = machine["torch"]
    cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    yield "torch", f"{torch['version']}, {cuda}, {torch['threads']} threads"
    gpus = machine["gpus"]
    if isinstance(gpus, str) or not gpus:
        yield "GPU", f"none: {gpus or machine['why_no_gpu']}"
        return
    for gpu in gpus:
        yield "GPU", f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}, compute capability {gpu['capability']}"


def _package_lines(facts: dict[str, Any]) -> list[str]:
    if facts["packages"] is None:
        return [
            "packages   longrecall runs from a source folder that was never installed, so the list of packages that it"
            ' needs is missing; pip install -e "." writes it'
        ]
    lines = []
    for extra in (None, *facts["extras"]):
        of = [Package(**one) for one in facts["packages"] if one["extra"] == extra]
        lines.append("base: needed by everything" if extra is None else f"{extra}: {facts['extras'][extra]}")
        there = [f"{one.name} {one.version}" for one in of if one.version is not None and one.trouble is None]
        lines += [f"  installed: {', '.join(there)}"] if there else []
        lines += [f"  broken: {one.name} {one.version}: {one.trouble}" for one in of if one.trouble is not None]
        missing = [one.name for one in of if one.version is None]
        lines += [f"  missing: {', '.join(missing)}; {install_command(*missing)}"] if missing else []
        lines += [] if of else ["  needs nothing beyond the base"]
    return lines


def _op_lines(ops: Sequence[dict[str, Any]] | str) -> list[str]:
    """Ops of the same backends for the same reasons side by side."""
    if isinstance(ops, str):
        return [f"  {ops}"]
    groups: dict[str, list[str]] = {}
    for one in ops:
        said = [f"    not {name}: {reason}" for name, reason in one["why_not"].items()]
        said += [f"    for Hopper: {name}" for name, reason in one["hopper"].items() if reason is None]
        reasons = dict.fromkeys(reason for reason in one["hopper"].values() if reason is not None)
        said += [f"    no kernels for Hopper: {reason}" for reason in reasons]
        heading = ", else ".join(one["runs"]) or "nothing"
        groups.setdefault("\n".join([heading, *said]), []).append(one["op"])
    lines = []
    for group, names in groups.items():
        heading, *below = group.split("\n")
        lines += [f"  {heading}: {', '.join(names)}", *below]
    return lines


def _folder_lines(folders: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("folder for", "where", "state")]
    for one in folders:
        state = one["trouble"]
        if state is None:
            state = f"{'writable' if one['exists'] else 'made when needed'}, {format_bytes(one['free_bytes'])} free"
        rows.append((one["what"], _short(one["path"] or "?"), state))
    return aligned(rows, left=3)


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if home != "/" and path.startswith(f"{home}{os.sep}") else path
