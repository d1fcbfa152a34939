"""The wheel as a user installs it: into an environment with the base dependencies alone, run far from the clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_project import PROJECT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def needed_by(requirements: list[str]) -> set[str]:
    """Names of the packages that these requirements bring, those themselves included."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in found or not applies:
            continue
        try:
            waiting += [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        found.add(name)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; of the packages here it sees only what the wheel asks for."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("no package index: hatchling, which builds the wheel, cannot be had")
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("longrecall-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    python = place / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    base = needed_by(PROJECT["project"]["dependencies"]) | {"longrecall"}
    owners = {name: set(map(canonicalize_name, of)) for name, of in packages_distributions().items()}
    others = [name for name, of in owners.items() if not base & of]
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    (packages / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({[name for name in others if name.isidentifier()]!r}))\n"
    )
    return place


def run(home: Path, *words: str) -> str:
    """What a command printed; run in an empty folder of its own, without the clone's variables."""
    (home / "work").mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(home / "venv" / "bin" / "longrecall"), *words]
    done = subprocess.run(command, cwd=home / "work", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    assert str(ROOT) not in done.stdout + done.stderr
    return done.stdout


def test_the_whole_job(home: Path) -> None:
    assert run(home, "--version").startswith("longrecall ")
    facts = json.loads(run(home, "doctor", "--json"))
    assert facts["problems"] == [] and facts["longrecall"]["metadata"] == facts["longrecall"]["version"]
    assert {one["name"] for one in facts["packages"] if one["extra"] is None and one["version"]} >= {"torch", "wrapt"}
    assert facts["machine"]["ops"] and {one["extra"] for one in facts["packages"]} >= {None, "eval", "serve"}
    table = run(home, "demo", "--steps", "2", "--samples", "8")
    assert "phone book among 8 pairs" in table
    made = home / "work" / "runs" / "demo"
    assert "<svg" in (made / "report.html").read_text(encoding="utf-8")
    for result in ("before", "after", "control"):
        text = (made / f"{result}.json").read_text(encoding="utf-8")
        assert str(ROOT) not in text and json.loads(text)["kind"] == "evaluation"
    files = ["runs/demo/before.json", "runs/demo/after.json"]
    assert "no clear change" in run(home, "compare", *files)
    assert json.loads(run(home, "info", "runs/demo/checkpoint", "--json"))["surgery"]
    assert run(home, "generate", "runs/demo/checkpoint", "--prompt", "The fox ", "--max-new-tokens", "4")
    evaluated = ["eval", "runs/demo/checkpoint", "--tasks", "phonebook", "--lengths", "64", "--samples", "2"]
    run(home, *evaluated, "--pairs", "1", "--out", "more.json")
    run(home, "report", *files, "more.json", "-o", "page.html")
    assert "dry run" in run(home, "sweep", "recipes/sweeps/mqar_smoke.yaml", "--dry-run")
    assert json.loads(run(home, "info", "recipes/configs/gla_400m.json", "--json"))["parameters"] > 10**8
    assert (home / "work" / "page.html").stat().st_size > 10_000
