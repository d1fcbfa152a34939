"""The promises of the project as a whole: layout, imports, packaging, the README's commands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import longrecall
from longrecall.cli.main import VERBS, build_parser
from longrecall.doctor.packages import PURPOSES
from longrecall.installing import install_command
from tests.import_graph import ImportGraph, circle, circular_edges, parsed, statements

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "longrecall"
FILES = sorted(SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

HEIGHT = {"ops": 0, "layers": 1, "models": 2, "inference": 3, "demo": 5, "doctor": 5, "cli": 6} | dict.fromkeys(
    ("surgery", "export", "training", "evaluation", "diagnostics", "report", "sweep", "serving"), 4
)
"""A room imports its own height (without circles) and what lies below; files beside the rooms are free to all."""

OPTIONAL = (
    *("aiohttp", "datasets", "pyarrow", "tensorboard", "triton", "lm_eval", "wandb"),
    *("nltk", "rouge_score", "sacrebleu", "wonderwords"),
)
# Kernels need Triton where they are defined; backend.py, which everybody imports, does not.
NEED_EXTRAS = {
    ".".join(("longrecall", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for folder in ("*/triton", "*/hopper", "kernels")
    for path in (SOURCE / "ops").glob(f"{folder}/*.py")
    if path.stem not in ("__init__", "backend")
}


def module_name(path: Path) -> str:
    parts = ("longrecall", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """`ops` of `longrecall.ops.reference`; None outside the package and for files beside the rooms."""
    parts = module.split(".")
    return parts[1] if parts[0] == "longrecall" and len(parts) > 1 and (SOURCE / parts[1]).is_dir() else None


def complaint(room: str, other: str) -> str | None:
    """Why a file in `room` may not import from `other`; None when it may."""
    if room == other:
        return None
    if room == "tasks":
        return "tasks import no other room"
    if other == "tasks":
        return None if HEIGHT[room] >= 4 else "only evaluation, training and what stands above them use tasks"
    return "imports point downwards" if HEIGHT[other] > HEIGHT[room] else None


def test_the_import_rule_itself() -> None:
    assert complaint("ops", "layers") and complaint("models", "surgery") and complaint("tasks", "models")
    assert complaint("layers", "tasks") and complaint("report", "cli")
    assert not complaint("cli", "ops") and not complaint("training", "tasks") and not complaint("ops", "ops")


@pytest.fixture(scope="module")
def imports() -> ImportGraph:
    return ImportGraph(SOURCE, ROOT / "experiments", scripts=(ROOT / "benchmarks",))


def test_no_imports_go_in_a_circle(imports: ImportGraph) -> None:
    """Neither at the top of a file nor inside functions nor for types, in the package, experiments and benchmarks."""
    found = sorted({circle(imports.edges, edge) for edge in circular_edges(imports.edges)})
    assert not found, "imports in a circle; move what both need to a file that imports neither:\n" + "\n".join(found)


def test_imports_point_downwards(imports: ImportGraph) -> None:
    wrong = []
    siblings: dict[str, set[str]] = {}
    for module, others in imports.edges.items():
        room = room_of(module)
        if room is None:
            continue
        for name in others:
            other = room_of(name)
            if other is None:
                continue
            reason = complaint(room, other)
            if reason:
                wrong.append(f"{module} imports {name}: {reason}")
            elif other != room:
                siblings.setdefault(room, set()).add(other)
    assert not wrong, "\n".join(wrong)
    # Raises CycleError where two rooms of one height need each other.
    TopologicalSorter(siblings).prepare()


def test_the_package_imports_neither_scripts_nor_tests(imports: ImportGraph) -> None:
    """What is installed comes without them."""
    package = {name: others for name, others in imports.edges.items() if name.split(".")[0] == "longrecall"}
    assert {other.split(".")[0] for others in package.values() for other in others} == {"longrecall"}


def test_every_room_has_a_height() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= {*HEIGHT, "tasks"}, "a new room: say in docs/architecture.md and here where it stands"


def test_files_and_functions_stay_readable() -> None:
    """One test for hundreds of files, which says all that is too long."""
    found = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            found.append(f"{module_name(path)} has {text.count(chr(10))} lines; split the file")
        for node in statements(path):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > 60:
                    found.append(f"{module_name(path)}: {node.name} has {lines} lines; split it")
    assert not found, "\n".join(found)


def declared(extra: str | None = None) -> set[str]:
    """Names under which packages are imported: of the base dependencies, or of an extra."""
    project = PROJECT["project"]
    found = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    names = {canonicalize_name(Requirement(text).name).replace("-", "_") for text in found}
    return {"yaml" if name == "pyyaml" else name for name in names}


OURS_AND_PYTHONS = {"longrecall", *sys.stdlib_module_names}


def late(path: Path) -> Iterator[tuple[str, bool]]:
    """Packages of others that a file imports, and whether it does so late: in a function, or where it may fail."""
    waiting: list[tuple[ast.AST, bool]] = [(parsed(path), False)]
    while waiting:
        node, is_late = waiting.pop()
        if isinstance(node, ast.expr):
            continue
        is_late = is_late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try) or _for_types(node)
        waiting += [(inner, is_late) for inner in ast.iter_child_nodes(node)]
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in {name.split(".")[0] for name in names} - OURS_AND_PYTHONS:
            yield name, is_late


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_what_is_imported_is_declared() -> None:
    """Everything imported is a base dependency, or belongs to an extra and is imported only where it is used."""
    base = declared()
    extras = {name for extra in ("data", "eval", "gpu", "logging", "quantize", "serve") for name in declared(extra)}
    assert {"torch", "transformers", "matplotlib", "jinja2", "yaml"} <= base
    for path in FILES:
        for name, is_late in late(path):
            assert name in base | extras, f"{path.name} imports {name}, which pyproject.toml does not ask for"
            assert name in base or is_late or module_name(path) in NEED_EXTRAS, f"{path.name} needs {name} at once"


def test_advice_names_packages_and_not_our_extras() -> None:
    """An index need not have this package; `-e ".[...]"` in a clone works."""
    places = [*FILES, ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "constraints.txt"]
    wrong = [path.name for path in places if re.search(r"longrecall\[[a-z,]+\]", path.read_text(encoding="utf-8"))]
    assert wrong == []
    assert install_command("lm_eval", "pyarrow", "nothing-of-ours").startswith('pip install "lm_eval>=')
    assert install_command("nothing-of-ours") == "pip install nothing-of-ours"


def test_the_pinned_packages_print_the_harness_table_with_its_headers() -> None:
    """Before 1.0 pytablewriter knew no `headers`, and lm_eval's table had the columns A, B, C."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert Version(pins["pytablewriter"]) >= Version("1.0")


def test_without_metadata_the_names_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree on PYTHONPATH has none."""
    monkeypatch.setattr("longrecall.installing.requires", Mock(side_effect=PackageNotFoundError("longrecall")))
    assert install_command("lm-eval", "nltk") == "pip install lm-eval nltk"


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, longrecall, longrecall.cli\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    for name in longrecall.__all__:
        assert getattr(longrecall, name) is getattr(longrecall, name)
        assert name in dir(longrecall)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = longrecall.nonsense  # type: ignore[attr-defined]


ORDERS = (
    "import longrecall",
    "import transformers; import longrecall",
    "from transformers import AutoModelForCausalLM, AutoConfig; import longrecall",
    "from longrecall import RecurrentLM",
    "from longrecall.models.config import RecurrentConfig",
)
AUTO_CLASSES = """
from transformers import AutoConfig, AutoModelForCausalLM
mixer = {"type": "gla", "num_heads": 1, "key_dim": 2, "value_dim": 2}
config = AutoConfig.for_model("longrecall", hidden_size=4, layers=[{"mixer": mixer}])
model = AutoModelForCausalLM.from_config(config)
from longrecall.models import config as home, recurrent_lm
assert type(config) is home.RecurrentConfig and type(model) is recurrent_lm.RecurrentLM
"""
WITHOUT_EXTRAS = """
# torch has brought some along.
for name in (*OPTIONAL, *(name for name in sys.modules if name.split(".")[0] in OPTIONAL)): sys.modules[name] = None
for name in MODULES: importlib.import_module(name)
"""
FORK = """
import contextlib, importlib, os, sys
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor, torch.utils.checkpoint
import accelerate, huggingface_hub.hf_api, jinja2, safetensors.torch, tokenizers
for name in ("PIL.Image", "regex", "scipy.optimize", "scipy.spatial.transform"):  # where transformers finds them
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert not {"transformers", "longrecall"} & sys.modules.keys()
for code in CODES:
    child = os.fork()
    if not child:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


@pytest.mark.long
def test_imports_in_new_processes() -> None:
    """Every module imports without the extras, and transformers' Auto classes know longrecall in any order of imports.

    Each is tried in a process that has imported nothing of ours, nor transformers or an extra: one process with torch
    and what else the two need forks them all.
    """
    modules = [name for name in map(module_name, FILES) if name not in NEED_EXTRAS]
    codes = [WITHOUT_EXTRAS, *(order + AUTO_CLASSES for order in ORDERS)]
    given = f"OPTIONAL, MODULES, CODES = {OPTIONAL!r}, {modules!r}, {codes!r}"
    done = subprocess.run([sys.executable, "-c", given + FORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def shell_lines(document: str) -> list[list[str]]:
    """The commands in ```sh blocks, without comments."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_commands_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = shell_lines(document)
    assert any(words[0] == "make" for words in commands)
    for words in commands:
        match words:
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), words
            case ["longrecall", *rest]:
                build_parser((rest[0],)).parse_args(rest)
            case [path, *_] if "/" in path:
                assert os.access(ROOT / path, os.X_OK), words
            case _:
                assert words[:3] == ["pip", "install", "-e"], f"{words}: teach this test to check it"


def test_the_readme_lists_every_verb() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"`longrecall {verb}" not in text] == []


def test_the_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert ["make", "test"] in shell_lines("README.md")
    assert {"set -euo pipefail", "make lint", "make test"} <= set(script)


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_constraints_pin_every_dependency_within_its_bounds() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    installed = re.search(r"^EXTRAS \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert installed is not None
    chosen = [extras[extra] for extra in installed[1].split(",")]
    for requirement in map(Requirement, [*PROJECT["project"]["dependencies"], *(r for group in chosen for r in group)]):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(versions[name]), f"constraints.txt pins {name} {versions[name]}"


def test_the_source_distribution_holds_what_the_pages_and_the_tests_use() -> None:
    names = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    # pyproject.toml and the licence travel by themselves.
    left_out = {"LICENSE", "pyproject.toml", ".gitignore"}
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout: nothing says which files are the project's")
    assert {f"/{line.split('/')[0]}" for line in done.stdout.splitlines()} - {f"/{name}" for name in left_out} == set(
        names
    )


def test_the_citation_knows_this_version_and_the_papers() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (longrecall.__version__, PROJECT["project"]["license"])
    assert cited["authors"] == PROJECT["project"]["authors"] and cited["keywords"]
    named = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()).casefold()
    assert len(cited["references"]) == 4
    for paper in cited["references"]:
        assert paper["title"].casefold() in named and paper["url"].startswith("https://") and paper["authors"]


def test_the_security_policy_names_tests_that_there_are() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    files = re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)?`", text)
    assert len(files) > 6
    there = {name: (ROOT / name).read_text(encoding="utf-8") for name in files}
    for name in re.findall(r"\b(test_\w+)`", text.replace(".py`", "")):
        assert any(f"def {name}(" in code for code in there.values()), name


def test_the_page_of_extras_names_every_extra() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/install.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: words.replace("`", "") for name, words in rows}
    assert told == {
        name: words for name, words in PURPOSES.items() if PROJECT["project"]["optional-dependencies"][name]
    }


def test_the_description_of_the_package_leads_nowhere_wrong() -> None:
    """An index shows the README without the other files, so links to them become words."""
    code = (ROOT / "hatch_build.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {"MetadataHookInterface": object}  # hatchling builds the package, and is not needed after
    exec(re.sub(r"^from hatchling.*$", "", code, flags=re.MULTILINE), names)
    project = names["DescriptionHook"]()
    project.root, metadata = str(ROOT), {}
    project.update(metadata)
    text = metadata["readme"]["text"]
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == [] and "surgery, training, its data" in " ".join(
        text.split()
    )
    assert metadata["readme"]["content-type"] == "text/markdown" and "![" not in text


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{longrecall.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
