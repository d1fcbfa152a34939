"""What longrecall's own metadata asks for, what of it is installed, and whether it can be imported."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, version
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

PURPOSES = {
    "data": "training on data sets of the hub and on Parquet files",
    "dev": "work on longrecall itself: make test, make lint",
    "docs": "the documentation site: make docs, make docs-build",
    "eval": "tasks of lm-evaluation-harness, and questions that are scored by summary or translation metrics",
    "gpu": "fused kernels on NVIDIA GPUs",
    "logging": "training curves in TensorBoard",
    "peft": "adapters such as LoRA on a model",
    "quantize": "weights stored in one byte each (--quantize)",
    "report": "nothing more; it is kept so that older install commands still work",
    "serve": "longrecall serve",
}
"""Extra -> what it is for. The packages of an extra are in the metadata alone."""

SECONDS = 300
"""To import one package, on a machine that is busy or has a slow disk."""


@dataclass(frozen=True)
class Package:
    """A package that longrecall asks for."""

    name: str
    extra: str | None
    """The extra that asks for it; None = the base."""
    bounds: str
    """Of its version: ">=2.11"."""
    version: str | None
    """What is installed; None = nothing is."""
    module: str | None
    """The name under which it is imported; None = it has none, or it is not installed."""
    trouble: str | None
    """What is wrong with what is installed, in words; None = nothing is known to be."""


def asked_for(extra: str | None = None) -> list[Requirement]:
    """Return what the base asks for, or an extra, on this machine; markers of other systems leave theirs out.

    Raises:
        PackageNotFoundError: longrecall was never installed: it runs from a source tree, which has no metadata.
    """
    declared = [Requirement(text) for text in metadata("longrecall").get_all("Requires-Dist") or ()]
    base = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
    if extra is None:
        return base
    names = {canonicalize_name(one.name) for one in base}
    more = [one for one in declared if one.marker is not None and one.marker.evaluate({"extra": extra})]
    return [one for one in more if canonicalize_name(one.name) not in names]


def extras() -> list[str]:
    """Return the names of all extras, in alphabetical order."""
    return sorted(metadata("longrecall").get_all("Provides-Extra") or ())


def look_up() -> list[Package] | None:
    """Return every package that longrecall asks for, the base first; None = the metadata is not there.

    Nothing is imported: only versions are looked at.
    """
    modules = _modules()
    try:
        wanted = [(extra, one) for extra in (None, *extras()) for one in asked_for(extra)]
    except PackageNotFoundError:
        return None
    found = []
    for extra, one in wanted:
        installed = _version(one.name)
        module = modules.get(canonicalize_name(one.name))
        trouble = None if installed is None else _unfit(one, installed)
        found.append(Package(one.name, extra, str(one.specifier), installed, module, trouble))
    return found


def metadata_version() -> str | None:
    """Return the version in longrecall's metadata, None where there is none."""
    return _version("longrecall")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _unfit(asked: Requirement, installed: str) -> str | None:
    try:
        fits = asked.specifier.contains(installed, prereleases=True)
    except InvalidVersion:
        return f"its version {installed!r} cannot be read"
    return None if fits else f"{asked.name}{asked.specifier} is needed"


def _modules() -> dict[str, str]:
    """Package -> the name under which it is imported: its own where it has that, else its first public one."""
    names: dict[str, list[str]] = {}
    for module, packages in packages_distributions().items():
        if module.isidentifier() and not module.startswith("_"):
            for package in packages:
                names.setdefault(canonicalize_name(package), []).append(module)
    return {
        package: own if (own := package.replace("-", "_")) in modules else min(modules)
        for package, modules in names.items()
    }


_IMPORTS = """
import importlib, json, os, sys, warnings
warnings.simplefilter("ignore")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a module prints is no answer
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as failure:
        said = (str(failure).strip().splitlines() or [""])[0]
        error = f"cannot be imported: {type(failure).__name__}: {said}"
    print(json.dumps([name, error]), file=answers, flush=True)
"""


def why_no_imports(modules: Iterable[str], seconds: float = SECONDS) -> dict[str, str | None]:
    """Import modules in another process, one after the other; return why each cannot be imported, None = it can.

    A module may end the process, by a signal even: then that is its reason, and the others are tried in a new one.
    """
    waiting = list(dict.fromkeys(modules))
    found: dict[str, str | None] = {}
    while waiting:
        lines, reason = in_another_process(_IMPORTS, waiting, seconds * len(waiting))
        found |= {name: error for name, error in map(json.loads, lines)}
        left = [name for name in waiting if name not in found]
        if left:
            found[left[0]] = f"cannot be imported: {reason or 'the process ended without an answer'}"
        waiting = left[1:]
    return found


def in_another_process(code: str, words: Sequence[str], seconds: float) -> tuple[list[str], str | None]:
    """Run Python code in a process of its own; return the lines it printed, and why it failed in words, None = no.

    The current folder is not searched for modules: a file in it may have the name of a package.
    """
    command = [sys.executable, "-P", "-c", code, *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as late:
        return _lines(late.stdout), f"no answer within {seconds:.0f} seconds"
    if done.returncode == 0:
        return _lines(done.stdout), None
    if done.returncode < 0:
        return _lines(done.stdout), f"it ends Python with {_signal_name(-done.returncode)}"
    said = _lines(done.stderr)
    return _lines(done.stdout), said[-1] if said else f"it ends Python with exit code {done.returncode}"


def _lines(output: Any) -> list[str]:
    text = (output or b"").decode("utf-8", errors="replace")
    return [line for line in re.split(r"\r?\n", text) if line.strip()]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
