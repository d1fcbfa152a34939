"""`longrecall doctor`: what it says of packages, of this machine, and of an environment that is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.doctor import examination, machine, packages
from longrecall.doctor.packages import PURPOSES, in_another_process, why_no_imports
from longrecall.errors import UserError
from longrecall.ops import backends
from longrecall.ops.machine import op_here, ops_here
from tests.test_project import PROJECT

DECLARED = [
    "torch>=2.11",
    "tqdm>=4.66",
    "numpy>=2.0",
    "lm-eval>=0.4; extra == 'eval'",
    "numpy>=2.0; extra == 'eval'",
    "nltk>=3.9; extra == 'eval'",
    "winrt>=1; platform_system == 'Nowhere' and extra == 'eval'",
]
INSTALLED = {"longrecall": "0.0.9", "torch": "2.3.0", "numpy": "2.4", "lm-eval": "0.4.13"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of which only the metadata is there: a base package is missing, one is too old."""
    installed = dict(INSTALLED)

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    fields = {"Requires-Dist": DECLARED, "Provides-Extra": ["report", "eval"]}
    monkeypatch.setattr(packages, "metadata", lambda _: SimpleNamespace(get_all=fields.get))
    monkeypatch.setattr(packages, "version", version)
    modules = {name.replace("-", "_"): [name] for name in installed}
    monkeypatch.setattr(packages, "packages_distributions", lambda: modules | {"torchgen": ["torch"]})
    monkeypatch.setattr(examination, "why_no_imports", lambda names: {**dict.fromkeys(names), "lm_eval": "is broken"})
    monkeypatch.setattr(examination, "_machine", lambda: (None, None))
    return installed


def examined(capsys: pytest.CaptureFixture[str], code: int) -> tuple[dict[str, Any], str]:
    """What the verb prints as JSON, and the line on stderr."""
    assert main(["doctor", "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_a_broken_base_is_code_2_and_one_line(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    facts, line = examined(capsys, 2)
    found = {(one["name"], one["extra"]): one for one in facts["packages"]}
    # What the base asks for is not an extra's too; what other systems need is not asked for here.
    assert list(found) == [("torch", None), ("tqdm", None), ("numpy", None), ("lm-eval", "eval"), ("nltk", "eval")]
    assert found["torch", None]["trouble"] == "torch>=2.11 is needed" and found["numpy", None]["trouble"] is None
    assert line.count("\n") == 1 and "longrecall does not work here: torch 2.3.0: torch>=2.11 is needed; " in line
    assert "tqdm is not installed; pip install" in line and "lm-eval" not in line
    assert main(["doctor"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "its metadata says 0.0.9; install it again" in said
    assert "broken: lm-eval 0.4.13: is broken" in said and 'missing: nltk; pip install "nltk>=3.9' in said
    assert f"eval: {PURPOSES['eval']}" in said and "report: nothing more" in said


def test_a_missing_extra_is_no_trouble(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    environment |= {"torch": "2.13.0+cpu", "tqdm": "5.0"}
    facts, line = examined(capsys, 0)
    assert facts["problems"] == [] and line == ""
    assert main(["doctor"]) == 0 and capsys.readouterr().out.endswith("\n\nThe base works.\n")


def test_a_source_tree_without_metadata(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def metadata(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "metadata", metadata)
    facts, _ = examined(capsys, 0)
    assert facts["packages"] is None
    assert main(["doctor"]) == 0 and "was never installed" in capsys.readouterr().out
    # Then the models themselves say whether the base works.
    broken = {examination._MODEL: "cannot be imported: ImportError: no torch"}
    monkeypatch.setattr(examination, "why_no_imports", lambda names: dict.fromkeys(names) | broken)
    assert "ImportError: no torch" in examined(capsys, 2)[1]


def test_every_extra_has_its_purpose_in_words() -> None:
    assert set(PURPOSES) == set(PROJECT["project"]["optional-dependencies"])


def test_modules_that_fail_crash_talk_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {
        "fine_one": "print('hello')",
        "raising": "raise RuntimeError('first line\\nsecond')",
        "leaving": "raise SystemExit(3)",
        "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "quitting": "import os; os._exit(0)",
        "fine_two": "",
    }
    for name, code in codes.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert why_no_imports([*codes, "fine_one", "nowhere"]) == {
        "fine_one": None,
        "raising": "cannot be imported: RuntimeError: first line",
        "leaving": "cannot be imported: SystemExit: 3",
        "crashing": "cannot be imported: it ends Python with SIGSEGV",
        "quitting": "cannot be imported: the process ended without an answer",
        "fine_two": None,
        "nowhere": "cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
    }
    slow = "print('said', flush=True); import time; time.sleep(60)"
    # Half a second is for Python to start in, which takes 20 ms, on a busy machine more.
    assert in_another_process(slow, (), seconds=0.5)[1] == "no answer within 0 seconds"


def test_the_verb_itself_needs_little() -> None:
    """Where the base is missing, somebody has to say so: all that does is Python, our own files, and packaging."""
    code = (
        "import builtins, sys\n"
        "before = builtins.__import__\n"
        "def find(name, *rest, **more):\n"
        "    if name.split('.')[0] in {'wrapt', 'torch', 'transformers', 'yaml', 'tqdm', 'jinja2', 'numpy'}:\n"
        "        raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "    return before(name, *rest, **more)\n"
        "builtins.__import__ = find\n"
        "from longrecall.cli.main import main\n"
        "from longrecall.doctor import examination\n"
        "examination.why_no_imports = lambda names: dict.fromkeys(names) | {'torch': 'is broken'}\n"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "wrapt is not installed: transformers will not know longrecall" in done.stderr
    assert "Traceback" not in done.stderr and "python      3." in done.stdout


def test_a_file_of_the_current_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray_package.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "ModuleNotFoundError" in str(why_no_imports(["stray_package"])["stray_package"])


def test_this_machine_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = tmp_path / "file"
    hidden.touch()
    monkeypatch.setattr(machine, "_hub", lambda: str(hidden / "hub"))
    monkeypatch.setattr(machine, "_gpus", lambda: [{"name": "G", "memory_bytes": 2**30, "capability": "9.0"}])
    facts = machine.describe_machine()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"]["version"] and {one["op"] for one in facts["ops"]} == set(backends.OPS)
    states = {one["what"]: one["trouble"] for one in facts["folders"]}
    assert states["checkpoints and tokenizers of the hub"] == f"{hidden} is no folder"
    assert states["temporary files"] is None
    ours = {"version": "1", "metadata": None, "place": "here"}
    whole = {"longrecall": ours, "python": ours, "packages": None, "extras": None, "machine": facts, "problems": []}
    said = examination.as_text(whole)
    assert "G, 1.0 GiB, compute capability 9.0" in said
    assert "chunked, else reference: " in said and f"{hidden} is no folder" in said
    # A driver that fails is one line in the place of what it would have told.
    monkeypatch.setattr(machine, "_gpus", lambda: 1 // 0)
    whole["machine"] = {**machine.describe_machine(), "ops": "RuntimeError: x"}
    assert "GPU         none: ZeroDivisionError" in examination.as_text(whole)


def test_ops_say_what_runs_and_why_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rule, norm = backends.OPS["gated_delta_rule"], backends.OPS["rms_norm"]
    monkeypatch.setattr("longrecall.ops.machine.why_no_kernels", lambda: "no GPU")
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "no GPU")
    assert op_here(rule).runs == ["chunked", "reference"] and op_here(rule).why_not["triton"] == "no GPU"
    assert {"fla", "flash_qla"} < set(op_here(rule).why_not)
    monkeypatch.setenv("LONGRECALL_BACKEND", "chunked")
    assert op_here(rule).runs == ["chunked"] and op_here(norm).runs == ["reference"]
    assert op_here(rule).why_not["reference"] == "LONGRECALL_BACKEND is chunked"
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    assert op_here(rule).runs == []  # as in a call, which raises
    monkeypatch.setenv("LONGRECALL_BACKEND", "trition")
    with pytest.raises(UserError, match='unknown backend "trition"'):
        ops_here()


def test_kernels_that_this_triton_cannot_import_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    for module in ("longrecall.ops.machine", "longrecall.ops.backends"):
        monkeypatch.setattr(f"{module}.why_no_kernels", lambda: None)
    monkeypatch.setattr("longrecall.ops.hopper_kernels.why_none_here", lambda: "not a Hopper GPU")

    def load(name: str) -> None:
        raise AttributeError("this Triton has no such thing\nand more")

    monkeypatch.setattr("longrecall.ops.machine.importlib", SimpleNamespace(import_module=load))
    found = op_here(backends.OPS["rms_norm"])
    assert found.runs == ["reference"]
    reason = "its kernels cannot be imported: AttributeError: this Triton has no such thing"
    assert found.why_not == {"triton": reason}
    monkeypatch.setattr("longrecall.ops.machine.importlib", SimpleNamespace(import_module=lambda name: None))
    rule = op_here(backends.OPS["gated_delta_rule"])
    assert rule.runs[0] == "triton" and set(rule.hopper.values()) == {"not a Hopper GPU"}
