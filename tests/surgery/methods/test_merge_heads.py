"""Which numbers merge_heads keeps and draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall.layers.mixers.registry import mixer_config
from longrecall.surgery.expansion import Operation

WIDTH = 12
KINDS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", "num_heads": 3, "key_dim": 4, "value_dim": 8, "gate_rank": 4},
    "gla_conv": {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 6, "conv_width": 4, "output_gate": False},
    "retnet": {"type": "retnet", "num_heads": 2, "key_dim": 8, "value_dim": 8, "conv_width": 4},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def random_layer(description: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = mixer_config(description).tensor_shapes(WIDTH)
    tensors = {f"mixer.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"mixer_norm.weight": torch.randn(WIDTH, generator=generator)}


def merge(kind: str, init: str, **options: object) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    description = mixer_config(KINDS[kind]).to_dict()
    tensors = random_layer(description)
    operation = Operation.check("merge_heads", init, options, 0)
    plan = operation.plan(0, description)
    generator = torch.Generator().manual_seed(0)
    return tensors, plan.mixer, operation.method.transform(description, tensors, init, operation.options, generator)


@each_kind
@pytest.mark.parametrize("init", ["preserve", "inherit", "perturb", "reinit", "handover"])
def test_shapes_are_those_of_the_new_mixer(kind: str, init: str) -> None:
    _, new, merged = merge(kind, init)
    shapes = {f"mixer.{name}": shape for name, shape in mixer_config(new).tensor_shapes(WIDTH).items()}
    assert {name: tuple(t.shape) for name, t in merged.items()} == shapes | {"mixer_norm.weight": (WIDTH,)}


@each_kind
@pytest.mark.parametrize("init", ["preserve", "inherit"])
def test_warm_merges_add_one_matrix_and_keep_the_rest(kind: str, init: str) -> None:
    tensors, new, merged = merge(kind, init)
    heads = KINDS[kind]["num_heads"]
    assert new["merged"] is True and new["num_heads"] == heads
    assert torch.equal(merged.pop("mixer.mixing"), torch.eye(heads) if init == "preserve" else torch.ones(heads, heads))
    assert merged.keys() == tensors.keys() and all(torch.equal(merged[name], tensors[name]) for name in tensors)


@each_kind
@pytest.mark.parametrize("conv", [False, True])
def test_perturb_touches_queries_and_keys_only(kind: str, conv: bool) -> None:
    tensors, _, merged = merge(kind, "perturb", shrink=0.75, noise_scale=0.5, mixing_noise=0.2, perturb_conv=conv)
    mixing = merged.pop("mixer.mixing")
    off = mixing[~torch.eye(len(mixing), dtype=torch.bool)]
    assert bool((mixing.diagonal() == 1).all()) and bool((off != 0).all()) and off.abs().max() <= 0.2
    changed = {name for name in tensors if not torch.equal(merged[name], tensors[name])}
    convs = {"mixer.q_conv.weight", "mixer.k_conv.weight"} if conv and KINDS[kind].get("conv_width") else set()
    assert changed == {"mixer.q_proj.weight", "mixer.k_proj.weight"} | convs
    for name in changed:
        bound = 0.5 * tensors[name].shape[1] ** -0.5
        noise = (merged[name] - 0.75 * tensors[name]).abs().max()
        # 1e-6: the subtraction of two float32 numbers near 1. Above 0.8: of >= 32 draws one is near the edge.
        assert 0.8 * bound < noise <= bound + 1e-6


@each_kind
def test_reinit_is_statex_one_head_block(kind: str) -> None:
    tensors, new, merged = merge(kind, "reinit")
    old = KINDS[kind]
    heads = old["num_heads"]
    sizes = {"num_heads": 1, "key_dim": heads * old["key_dim"], "value_dim": heads * old["value_dim"], "merged": False}
    assert {key: new[key] for key in sizes} == sizes
    for name, tensor in merged.items():
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
        elif name.endswith("bias"):
            assert bool((tensor == 0).all()), name
        else:
            outputs, inputs = tensor.shape
            xavier = 2.0**-2.5 * (6.0 / (inputs + outputs)) ** 0.5
            bound = 4**-0.5 if name.endswith("conv.weight") else xavier
            assert 0.8 * bound < tensor.abs().max() <= bound, name
            assert not torch.equal(tensor, tensors[name])
    assert merged["mixer.o_norm.weight"].shape == (heads * old["value_dim"],)


@each_kind
def test_handover_keeps_the_pre_norm_that_both_paths_share(kind: str) -> None:
    tensors, new, merged = merge(kind, "handover")
    _, one, reinit = merge(kind, "reinit")
    assert new["type"] == "handover" and new["new"] == one
    assert torch.equal(merged["mixer_norm.weight"], tensors["mixer_norm.weight"])
    for name in tensors:
        if name != "mixer_norm.weight":
            rest = name.removeprefix("mixer.")
            assert torch.equal(merged[f"mixer.old.{rest}"], tensors[name])
            assert torch.equal(merged[f"mixer.new.{rest}"], reinit[name])


def test_fresh_numbers_do_not_depend_on_the_order_of_the_tensors() -> None:
    description = mixer_config(KINDS["gla"]).to_dict()
    tensors = random_layer(description)
    operation = Operation.check("merge_heads", "reinit", {}, 0)
    results = [
        operation.method.transform(
            description, dict(order), "reinit", operation.options, torch.Generator().manual_seed(0)
        )
        for order in (tensors.items(), reversed(tensors.items()))
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in tensors)
