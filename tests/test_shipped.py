"""Recipes are found by the names that the pages give them, in a clone, in an installed package and anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrecall import shipped
from longrecall.cli.main import main
from longrecall.shipped import find_recipe, shipped_recipes
from longrecall.training.recipe import Recipe


def test_names_of_recipes_work_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "recipes/post_train.yaml" in shipped_recipes(".yaml")
    assert all(find_recipe(name).is_file() for name in [*shipped_recipes(".yaml"), *shipped_recipes(".json")])
    assert Recipe.load("recipes/post_train.yaml", ["model.checkpoint=x", "data.sources.0.path=y"]).run.tokens
    assert main(["info", "recipes/configs/gla_400m.json"]) == 0
    # A file of one's own of that name goes first.
    own = tmp_path / "recipes" / "post_train.yaml"
    own.parent.mkdir()
    own.write_text("{}")
    assert find_recipe("recipes/post_train.yaml") == Path("recipes/post_train.yaml")


def test_an_installed_package_has_them_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "assets" / "recipes"
    inside.mkdir(parents=True)
    (inside / "noise.yaml").write_text("{}")
    monkeypatch.setattr(shipped, "_PLACES", (inside, tmp_path / "recipes"))
    monkeypatch.chdir(tmp_path)
    assert find_recipe("recipes/noise.yaml") == inside / "noise.yaml"
    assert shipped_recipes(".yaml") == ["recipes/noise.yaml"]


@pytest.mark.parametrize("name", ["noise.yaml", "recipes", "recipes/../noise.yaml", "/recipes/noise.yaml"])
def test_other_names_stay_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == Path(name)


def test_a_missing_recipe_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipes/post_trian.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('there is no recipe recipes/post_trian.yaml. Did you mean "recipes/post_train.yaml"?')
    assert main(["train", "mine"]) == 2
    assert "longrecall ships with recipes/" in capsys.readouterr().err
    assert main(["info", "recipes/configs/gla_400.json"]) == 2
    assert 'Did you mean "recipes/configs/gla_400m.json"?' in capsys.readouterr().err
