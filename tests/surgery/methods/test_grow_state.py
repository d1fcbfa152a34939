"""Which numbers grow_state keeps, zeroes and draws, row by row and group by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrecall.layers.mixers.registry import mixer_config
from longrecall.surgery.expansion import Operation
from longrecall.surgery.fresh import layer_generator

WIDTH = 12


def mixer(groups: int = 2, state_dim: int = 3, **more: Any) -> dict[str, Any]:
    sizes = {"inner_dim": 16, "head_dim": 4, "groups": groups, "state_dim": state_dim, "proj_bias": True}
    return mixer_config({"type": "mamba2", **sizes, **more}).to_dict()


def random_layer(description: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = mixer_config(description).tensor_shapes(WIDTH)
    tensors = {f"mixer.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"mixer_norm.weight": torch.randn(WIDTH, generator=generator)}


def parts(name: str, tensor: Tensor, description: dict[str, Any]) -> dict[str, Tensor]:
    """Cut a tensor by the layout of docs/reference/tensors.md; B and C as [G, N, ...]."""
    inner, groups, state = description["inner_dim"], description["groups"], description["state_dim"]
    named = {"z": inner, "x": inner, "B": groups * state, "C": groups * state, "dt": inner // description["head_dim"]}
    if name.startswith("mixer.conv"):
        named = {key: named[key] for key in ("x", "B", "C")}
    pieces = dict(zip(named, torch.split(tensor, list(named.values())), strict=True))
    return {key: t.unflatten(0, (groups, state)) if key in "BC" else t for key, t in pieces.items()}


def grow(description: dict[str, Any], tensors: dict[str, Tensor], init: str, seed: int = 0, **options: object) -> Any:
    operation = Operation.check("grow_state", init, options, seed)
    plan = operation.plan(0, description)
    generator = torch.Generator().manual_seed(seed)
    grown = operation.method.transform(description, tensors, init, operation.options, generator)
    return plan.mixer, grown


PARTED = ("mixer.in_proj.weight", "mixer.in_proj.bias", "mixer.conv.weight", "mixer.conv.bias")


@settings(max_examples=30, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    state_dim=st.integers(1, 5),
    extra=st.integers(1, 6),
    init=st.sampled_from(["preserve", "inherit", "perturb", "reinit"]),
    conv_bias=st.booleans(),
)
def test_layout(groups: int, state_dim: int, extra: int, init: str, conv_bias: bool) -> None:
    old = mixer(groups, state_dim, conv_bias=conv_bias)
    tensors = random_layer(old)
    new, grown = grow(old, tensors, init, state_dim=state_dim + extra)
    shapes = {f"mixer.{name}": shape for name, shape in mixer_config(new).tensor_shapes(WIDTH).items()}
    assert {name: tuple(t.shape) for name, t in grown.items() if name != "mixer_norm.weight"} == shapes
    for name, tensor in tensors.items():
        if name not in PARTED:
            assert torch.equal(grown[name], tensor)
            continue
        before, after = parts(name, tensor, old), parts(name, grown[name], new)
        for key in set(before) - {"B", "C"}:
            assert torch.equal(after[key], before[key]), (name, key)
        for key in ("B", "C"):
            kept, added = after[key][:, :state_dim], after[key][:, state_dim:]
            same = init in ("preserve", "inherit") or (init == "perturb" and name.startswith("mixer.conv"))
            assert torch.equal(kept, before[key]) == same
            silent = init == "inherit" or (init == "preserve" and key == "C" and name != "mixer.conv.weight")
            assert bool((added == 0).all()) if silent else bool((added != 0).all())


def test_groups_grow_as_if_each_stood_alone() -> None:
    """Grouped B and C, grown, read back per group; a group-blind append would put rows of one group into the next."""
    old = mixer(groups=2, state_dim=2)
    tensors = random_layer(old)
    new, grown = grow(old, tensors, "preserve", factor=2)
    name = "mixer.in_proj.weight"
    inner = old["inner_dim"]
    rows = tensors[name][2 * inner : 2 * inner + 4]
    wide = grown[name][2 * inner : 2 * inner + 8]
    assert torch.equal(wide[0:2], rows[0:2]) and torch.equal(wide[4:6], rows[2:4])
    assert new["state_dim"] == 4


def test_fresh_rows_are_as_loud_as_the_layers_own() -> None:
    old = mixer(groups=1, state_dim=64)
    tensors = random_layer(old)
    for name in PARTED:
        tensors[name] = tensors[name] * 0.01
    cut = 2 * old["inner_dim"]
    tensors["mixer.in_proj.weight"][cut : cut + 64] *= 7.0
    new, grown = grow(old, tensors, "reinit", factor=4)
    fresh = parts("mixer.in_proj.weight", grown["mixer.in_proj.weight"], new)
    # 256 x 12 uniform numbers: their rms is known to about 1 part in 100; 5 % is four of those.
    assert fresh["B"].square().mean().sqrt() == pytest.approx(0.07, rel=0.05)
    assert fresh["C"].square().mean().sqrt() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(("scale", "fresh"), [(1.0, "usual"), (0.25, "usual")])
def test_perturb_is_shrink_plus_bounded_noise(scale: float, fresh: str) -> None:
    old = mixer(groups=1, state_dim=64)
    tensors = random_layer(old)
    new, grown = grow(old, tensors, "perturb", factor=2, shrink=0.75, noise_scale=scale, fresh=fresh, perturb_conv=True)
    for name, fan_in in zip(PARTED, (WIDTH, WIDTH, 4, 4), strict=True):
        before, after = parts(name, tensors[name], old), parts(name, grown[name], new)
        for key in ("B", "C"):
            noise = torch.cat([after[key][:, :64] - 0.75 * before[key], after[key][:, 64:]], 1)
            bound = scale * fan_in**-0.5
            # 1e-6: the subtraction of two float32 numbers near 1. Above 0.9: of >= 128 draws one is near the edge.
            assert 0.9 * bound < noise.abs().max() <= bound + 1e-6


def test_perturb_at_full_shrink_of_1_and_small_noise_is_close_to_the_old_rows() -> None:
    old = mixer()
    tensors = random_layer(old)
    _, grown = grow(old, tensors, "perturb", shrink=1.0, noise_scale=1e-6, perturb_conv=True)
    kept = parts("mixer.conv.weight", grown["mixer.conv.weight"], {**old, "state_dim": 12})["C"][:, :3]
    assert torch.allclose(kept, parts("mixer.conv.weight", tensors["mixer.conv.weight"], old)["C"], atol=1e-5)


def test_zero_rows_fall_back_to_a_new_layers_size_and_zero_biases_stay() -> None:
    old = mixer()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in random_layer(old).items()}
    new, grown = grow(old, tensors, "reinit")
    weight = parts("mixer.in_proj.weight", grown["mixer.in_proj.weight"], new)["B"]
    assert 0 < weight.abs().max() <= WIDTH**-0.5 and bool((grown["mixer.conv.bias"] == 0).all())


@pytest.mark.parametrize("init", ["reinit", "handover"])
def test_statex_option_resets_what_its_code_resets(init: str) -> None:
    old = mixer()
    tensors = random_layer(old)
    _, clean = grow(old, tensors, init)
    _, faithful = grow(old, tensors, init, statex=True)
    path = "mixer.new." if init == "handover" else "mixer."
    assert torch.equal(faithful[f"{path}A_log"], torch.tensor([1.0, 2.0, 3.0, 4.0]).log())
    assert bool((faithful[f"{path}dt_bias"] == 1).all()) and bool((faithful[f"{path}norm.weight"] == 1).all())
    changed = {name for name in clean if not torch.equal(clean[name], faithful[name])}
    assert changed == {f"{path}A_log", f"{path}dt_bias", f"{path}norm.weight"}


def test_handover_keeps_the_old_path_and_shares_the_pre_norm() -> None:
    old = mixer()
    tensors = random_layer(old)
    new, grown = grow(old, tensors, "handover")
    _, reinit = grow(old, tensors, "reinit")
    assert new == {"type": "handover", "old": old, "new": {**old, "state_dim": 12}}
    for name, tensor in tensors.items():
        rest = name.removeprefix("mixer.")
        expected = grown[name] if name == "mixer_norm.weight" else grown[f"mixer.old.{rest}"]
        assert torch.equal(expected, tensor)
        if name != "mixer_norm.weight":
            assert torch.equal(grown[f"mixer.new.{rest}"], reinit[name])
    assert grown["mixer.progress"].shape == () and grown["mixer.progress"].dtype == torch.float32


def test_every_seed_layer_and_round_draws_its_own_numbers() -> None:
    """Equal draws in two rounds would begin as copies of each other: twins with equal gradients for ever."""
    keys = [(seed, layer, earlier) for seed in (0, 1, 10) for layer in (0, 1, 10) for earlier in (0, 1, 10)]
    draws = [tuple(torch.rand(4, generator=layer_generator(*key)).tolist()) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [tuple(torch.rand(4, generator=layer_generator(*key)).tolist()) for key in keys]
