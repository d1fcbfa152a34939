from __future__ import annotations

import argparse
import errno
import io
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longrecall import __version__
from longrecall.cli.main import VERBS, main
from longrecall.errors import UserError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from longrecall.cli.main import main; sys.exit(main())"]


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if line.startswith("    ") and line[4] != " "} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"example:\n  longrecall {verb}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"longrecall {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from longrecall.cli.main import main; main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'yaml', 'tqdm'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The processor's time: other programs may have the machine meanwhile.
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # It is meant to take under 0.3 s on an idle machine; the factor 3 is for a busy one. torch alone takes over 1 s.
    assert statistics.median(times) < 0.9


def test_no_verb_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: longrecall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["expnad", "a", "b"], ["expnad", 'Did you mean "expand"?']),
        (["zzz"], ["zzz", "longrecall --help"]),
        (["--debug", "infp"], ['Did you mean "info"?']),
        (["info", "x", "--contxt", "3"], ["--contxt", 'Did you mean "--context"?', "longrecall info --help"]),
        (["info", "x", "--contxt=3"], ['Did you mean "--context"?']),
        (["info", "x", "surplus"], ["surplus", "longrecall info --help"]),
        (["info"], ["CKPT", "longrecall info --help"]),
        (["bench", "ops", "--batch", "two"], ["--batch", "two"]),
        (["--nonsense"], ["VERB"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    line = last_line(capsys)
    assert line.startswith("longrecall: error: ")
    for part in parts:
        assert part in line


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make `longrecall info x` raise."""

    def install(error: BaseException) -> None:
        def run(args: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr("longrecall.cli.info.run", run)

    return install


def wrapped(cause: BaseException) -> RuntimeError:
    error = RuntimeError("saving failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "parts"),
    [
        (UserError("the file\n x is empty"), 2, ["the file x is empty"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (OSError(errno.ENOSPC, "No space left on device", "out/model"), 2, ["no space left", "out/model"]),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2, ["no space left"]),
        (wrapped(OSError(errno.ENOSPC, "No space left on device")), 2, ["no space left"]),
        # How safetensors reports it: an exception of its own, without an errno.
        (RuntimeError("I/O error: No space left on device (os error 28)"), 2, ["no space left"]),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 2, ["no permission", "/out"]),
        (OSError(errno.EROFS, "Read-only file system", "/out"), 2, ["no permission", "/out"]),
        (MemoryError(), 2, ["memory ran out", "smaller"]),
        # How torch reports it on a CPU (the allocator's own words) and on a GPU (a class of its own).
        (
            wrapped(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")),
            2,
            ["memory ran out", "9 bytes"],
        ),
        # The system's own words, as Python has them and as safetensors hands them on; those of a GPU's driver.
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 2, ["memory ran out"]),
        (RuntimeError("Cannot allocate memory (os error 12)"), 2, ["memory ran out (Cannot"]),
        (RuntimeError("CUDA error: out of memory\nmore"), 2, ["memory ran out (CUDA error: out of memory)"]),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), 2, ["memory ran out (CUDA out of memory. Tried)"]),
        (ModuleNotFoundError("No module named 'no_yaml'", name="no_yaml.part"), 2, ['"no_yaml"', "longrecall doctor"]),
        (ModuleNotFoundError("No module named 'json.no'", name="json.no"), 1, ["json.no", "bug in longrecall"]),
        (KeyError("weight"), 1, ["KeyError", "'weight'", "bug in longrecall", "--debug"]),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1, ["FileNotFoundError", "bug in longrecall"]),
    ],
)
def test_every_failure_is_one_line_with_its_code(
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    parts: list[str],
) -> None:
    failing(error)
    assert main(["info", "x"]) == code
    line = last_line(capsys)
    assert line.startswith("longrecall: error: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("words", [["info", "x", "--debug"], ["--debug", "info", "x"]])
def test_debug_shows_the_traceback_of_a_bug(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    failing(KeyError("weight"))
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "in run" in error
    assert error.splitlines()[-1].startswith("longrecall: error: KeyError")


def test_debug_keeps_user_errors_short(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(UserError("short"))
    assert main(["info", "x", "--debug"]) == 2
    assert last_line(capsys) == "longrecall: error: short"


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        # argparse itself swallows errors of an unbuffered stdout.
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            [*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered
        )
    assert done.returncode == 2
    assert done.stderr.startswith("longrecall: error: no space left") and done.stderr.count("\n") == 1


def test_a_letter_that_stdout_lacks_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name that is no UTF-8, or an umlaut where the terminal knows ASCII."""
    for name, shown, encoding in ((b"b\xe4r", b"b\\udce4r", "utf-8"), ("bär".encode(), b"b\\xe4r", "ascii")):
        place = tmp_path / os.fsdecode(name)
        shutil.copy(ROOT / "experiments" / "results" / "demo" / "before.json", place)
        out = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, errors="strict"))
        assert main(["compare", str(place), str(place)]) == 0
        assert b"A: " in out.getvalue() and shown in out.getvalue()
