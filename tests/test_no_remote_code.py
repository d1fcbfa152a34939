"""No call of ours may run code of a checkpoint or a data set: every call that could is told so in the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

DISTRUSTING = {
    "from_pretrained",
    "from_config",
    "load_dataset",
    "load_dataset_builder",
    "get_dataset_config_names",
    "get_dataset_split_names",
    "load_custom_generate",
    "pipeline",
}
"""Functions of transformers and datasets that would run code which comes with what they read."""

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def untrustworthy(source: str) -> list[str]:
    """What in a module could run code of others: `line: reason` each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{node.lineno}: imports {name}" for name in names if name.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {word.arg: word.value for word in node.keywords}

        def says(option: str, value: bool, given: dict[str | None, ast.expr] = given) -> bool:
            return isinstance(said := given.get(option), ast.Constant) and said.value is value

        if name in DISTRUSTING and not says("trust_remote_code", False):
            found.append(f"{node.lineno}: {name} without trust_remote_code=False")
        if name == "load" and ast.unparse(node.func) == "torch.load" and not says("weights_only", True):
            found.append(f"{node.lineno}: torch.load without weights_only=True")
        if "allow_pickle" in given and not says("allow_pickle", False):
            found.append(f"{node.lineno}: allow_pickle")
    return found


def test_no_call_in_the_source_may_run_code_of_others() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = {str(path.relative_to(SOURCE)): untrustworthy(path.read_text(encoding="utf-8")) for path in files}
    assert len(files) > 200
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "AutoTokenizer.from_pretrained(x)",
        "transformers.AutoConfig.from_pretrained(x, trust_remote_code=None)",
        "from_pretrained(x, trust_remote_code=trust)",
        "AutoModel.from_config(x, **options)",
        "datasets.load_dataset(x, split=y)",
        "load_dataset(x, trust_remote_code=True)",
        "pipeline('text-generation', x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "numpy.load(x, allow_pickle=True)",
        "import pickle",
        "from pickle import loads",
    ],
)
def test_what_could_run_code_is_found(line: str) -> None:
    (found,) = untrustworthy(f"\n{line}")
    assert found.startswith("2: ")
    told = line.replace("(x", "(x, trust_remote_code=False, weights_only=True, allow_pickle=False", 1)
    if line.count("(x") and "trust_remote_code=" not in line and "_only=" not in line and "_pickle=" not in line:
        assert untrustworthy(told) == []
