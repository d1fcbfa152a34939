"""Parameters are read only while the module that owns them runs, entered through `__call__`: anybody's hooks count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longrecall import RecurrentConfig, RecurrentLM
from longrecall.errors import UserError
from longrecall.inference.segments import CapturedSegments
from longrecall.inference.step import DecodingStep
from longrecall.models.recurrent_layer import RecurrentLayer
from tests.conftest import MIXERS
from tests.hybrids import HYBRIDS, hybrid
from tests.layers import test_shared_block
from tests.models import test_memory_tokens
from tests.models.parameter_owners import gathered_by

MOE = {"type": "moe", "num_experts": 4, "top_k": 2, "inner_size": 8, "balance": 0.1, "shared_size": 6}
MOE |= {"shared_gate": True, "latent_size": 12, "router_in_fp32": True}
CHANNELS: dict[str, dict[str, Any]] = {
    "rwkv4_channel": {"type": "rwkv4_channel", "input_dim": 32, "inner_dim": 24},
    "rwkv6_channel": {"type": "rwkv6_channel", "input_dim": 32, "inner_dim": 24},
    "moe": MOE,
    "mlp_bias": {"type": "mlp", "inner_size": 24, "bias": True},
    "mlp_gelu": {"type": "mlp", "inner_size": 24, "gated": False, "activation": "gelu"},
}


def built(layers: list[dict[str, Any]], **more: Any) -> RecurrentLM:
    torch.manual_seed(0)
    config = RecurrentConfig(**{"hidden_size": 32, "vocab_size": 61, "initializer_range": 0.2, **more}, layers=layers)
    return RecurrentLM(config)


def with_channel(module: dict[str, Any]) -> dict[str, Any]:
    norm, names = {"kind": "layer", "bias": True}, (("mixer", MIXERS["gla"]), ("mlp", module))
    return {"blocks": [{"name": name, "module": own, "norm": norm, "post_norm": norm} for name, own in names]}


def every_mixer() -> RecurrentLM:
    mixers = [{"mixer": mixer, "mlp_size": 16} for mixer in MIXERS.values()]
    bounds = [{"mixer": MIXERS["hgrn2"] | extra, "mlp_size": 0} for extra in ({"bound_rows": 2}, {"bound_row": 1})]
    return built(mixers + bounds + [with_channel(module) for module in CHANNELS.values()])


MODELS: dict[str, Callable[[], RecurrentLM]] = {
    "mixers": every_mixer,
    "tied": lambda: built([{"mixer": MIXERS["gla_conv"], "mlp_size": 16}], tie_word_embeddings=True),
    "shared_block": test_shared_block.model,
    "retrieval": lambda: built(
        [
            {"mixer": MIXERS["retrieval"] | {"blend": blend, "selector": selector}, "mlp_size": 0}
            for blend, selector in (("learned", "weighted"), ("fixed", "hard"))
        ]
    ),
    **{f"memory tokens: {name}": partial(test_memory_tokens.build, name) for name in test_memory_tokens.MODELS},
    **{name: partial(hybrid, name) for name in HYBRIDS},
}


def results(model: RecurrentLM, columns: int = 13) -> dict[str, Tensor]:
    """What every way to use a model gives: with gradients, without, from a state, one token, generated text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 31, (2, columns), generator=generator).to(model.device)
    found: dict[str, Tensor] = {}
    model.train()
    for alone in (False, True):
        out = model(ids, labels=ids, loss_only=alone)
        out.loss.backward()
        found[f"loss, {alone}"] = out.loss
    model.eval()
    with torch.no_grad():
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        found["padded"] = model(ids, attention_mask=mask).logits[:, 4:]
        state = model.zero_state(2)
        for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:]):
            out = model(part, past_key_values=state, logits_to_keep=1)
            state = out.past_key_values
            found[f"after {part.shape[1]}"] = out.logits
        found["said"] = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
    return found


def gradients(model: RecurrentLM) -> dict[str, Tensor]:
    return {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def layers_and_root(model: nn.Module) -> Iterable[nn.Module]:
    """What users wrap: the layers, and the model for the rest."""
    return [model, *(module for module in model.modules() if isinstance(module, RecurrentLayer))]


UNITS: list[Callable[[nn.Module], Iterable[nn.Module]]] = [layers_and_root, nn.Module.modules]
"""Parents form products of parts that are no units at once; of parts that are, they have to call each."""


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_read_where_they_are_owned(name: str) -> None:
    model = MODELS[name]().double()
    expected = results(model) | gradients(model)
    for units in UNITS:
        model.zero_grad()
        with gathered_by(model, units(model)) as counts:
            found = results(model)
            for make in (DecodingStep, CapturedSegments):
                with pytest.raises(UserError, match="reads weights without calling the modules that own them, but "):
                    make(model, 1, room=64)
        found |= gradients(model)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            # float64: the same products, some of them formed apart.
            torch.testing.assert_close(
                found[key], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
            )
        silent = [unit for unit, count in counts.items() if not count]
        # Lists of modules, and what holds no weights of its own, need not be called.
        assert not any(any(True for _ in model.get_submodule(unit).parameters(recurse=False)) for unit in silent)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mixers", "retrieval", "shared_block"])
def test_kernels_read_parameters_where_they_are_owned(name: str) -> None:
    """Joint products and kernels run on GPUs alone."""
    model = MODELS[name]().cuda()
    expected = results(model, 70) | gradients(model)
    for units in UNITS:
        model.zero_grad()
        with gathered_by(model, units(model)):
            found = results(model, 70)
        found |= gradients(model)
        for key in expected.keys() - {"said"}:
            # float32 through many layers, of which some round once more where products are formed apart.
            one, other = found[key].detach(), expected[key].detach()
            error = float((one - other).norm() / other.norm().clamp(min=1e-6))
            assert error < 1e-3, (key, error)
