"""PEFT's adapters on every mixer: the layers are found, none is passed over, and merging changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longrecall import RecurrentLM
from longrecall.inference.generation import CapturedSampling
from longrecall.layers.fused_delta import why_not
from longrecall.layers.handover import Handover
from tests.conftest import MIXERS
from tests.hybrids import HYBRIDS, hybrid
from tests.models.test_transformers_trainer import ROWS, model_of, trainer_of

peft = pytest.importorskip("peft", reason='PEFT is not installed: pip install "peft>=0.21"')
# Of PEFT and what it imports, and of tied embeddings, which are not adapted here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
MOST = ("gla_conv", "mamba2", "mamba", "mom")


def tokens(columns: int = 14) -> torch.Tensor:
    return torch.randint(0, 256, (2, columns), generator=torch.Generator().manual_seed(0))


def adapted(model: RecurrentLM, config: Any) -> Any:
    """The model with adapters that have been trained: none of their weights is where it began."""
    for module in model.modules():
        if isinstance(module, Handover):
            module.progress.fill_(0.5)
    found = peft.get_peft_model(model.double().eval(), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            # AdaLoRA's "ranknum" is a count, which PEFT neither trains nor saves.
            if parameter.requires_grad and "ranknum" not in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return found.eval()


@pytest.mark.parametrize("name", list(MIXERS))
def test_every_linear_layer_of_every_mixer_is_adapted_and_counts(name: str) -> None:
    model, x = model_of(name), tokens()
    linear = {key for key, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    with torch.no_grad():
        before = model.double().eval()(x).logits
    found = adapted(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    layers = {key: module for key, module in found.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    assert {key.removeprefix("base_model.model.") for key in layers} == linear
    with torch.no_grad():
        together, padded = found(x).logits, found(x, attention_mask=mask).logits
        said = found.generate(input_ids=x, **GREEDY)
    assert (together - before).abs().max() > 0.1
    found.train()(x, labels=x).loss.backward()
    silent = [
        key
        for key, parameter in found.named_parameters()
        if parameter.requires_grad and not (parameter.grad is not None and bool(parameter.grad.abs().sum() > 0))
    ]
    assert silent == []
    merged = found.eval().merge_and_unload()
    assert not any(isinstance(module, peft.tuners.lora.Linear) for module in merged.modules())
    with torch.no_grad():
        # float64; two roundings of a sum instead of one, through a layer or two.
        torch.testing.assert_close(merged(x).logits, together, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(merged(x, attention_mask=mask).logits, padded, rtol=1e-9, atol=1e-9)
    assert torch.equal(merged.generate(x, **GREEDY), said)


METHODS: dict[str, Any] = {
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True),
    "lora of a head": lambda: peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"]),
    "lora of taps": lambda: peft.LoraConfig(r=2, target_parameters=["q_conv.weight"]),
    "whole modules": lambda: peft.LoraConfig(r=2, modules_to_save=["lm_head", "mixer_norm", "norm"]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=2, target_r=2, total_step=10),
    "ia3": lambda: peft.IA3Config(),
    "loha": lambda: peft.LoHaConfig(r=2),
    "vera": lambda: peft.VeraConfig(r=2),
    "oft": lambda: peft.OFTConfig(r=2, oft_block_size=0),
}


@pytest.mark.parametrize("method", list(METHODS))
def test_other_methods_train_come_back_and_merge(method: str, tmp_path: Path) -> None:
    def fresh() -> RecurrentLM:
        return model_of(*MOST, tie_word_embeddings=False)

    config, x = METHODS[method](), tokens()
    config.task_type = "CAUSAL_LM"
    with torch.no_grad():
        before = fresh().double().eval()(x).logits
    found = adapted(fresh(), config)
    with torch.no_grad():
        together = found(x).logits
        # Without logits the loss is made from the head's weight, where the head is nothing but a product with it.
        losses = [found(x, labels=x, loss_only=alone).loss.item() for alone in (False, True)]
    assert (together - before).abs().max() > 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    found.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh().double(), str(tmp_path), autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        # Adapters may be stored in float32; what a model makes of it grows through four layers.
        torch.testing.assert_close(again(x).logits, together, rtol=1e-3, atol=1e-3)
        merged = found.merge_and_unload()
        torch.testing.assert_close(merged(x).logits, together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "target"), [("hyena", "conv.weight"), ("mom", "k_conv.weight")])
def test_adapters_on_taps_that_a_mixer_shares_out_count(name: str, target: str) -> None:
    """Hyena's convolution is one of three parts, a memory's in MoM some rows of one of all memories."""
    model, x = model_of(name), tokens()
    with torch.no_grad():
        before = model.double().eval()(x).logits
    found = adapted(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_parameters=[target]))
    with torch.no_grad():
        together = found(x).logits
        merged = found.merge_and_unload()(x).logits
    assert (together - before).abs().max() > 0.01
    # float64; two roundings of a sum instead of one, through a layer.
    torch.testing.assert_close(merged, together, rtol=1e-9, atol=1e-9)


def test_kernels_make_way_for_adapters_on_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernels of Gated DeltaNet, interpreted where there is no GPU; taps are computed for a call alone."""
    monkeypatch.setenv("LONGRECALL_BACKEND", "triton")
    model = model_of("gated_delta_net")
    layer, x = model.model.layers[0].mixer, torch.zeros(1, 70, 32)
    assert "adapter" not in str(why_not(layer, x, None, None))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_parameters=["k_conv.weight"])
    peft.get_peft_model(model, config)
    assert "an adapter on the short convolutions" in str(why_not(layer, x, None, None))


def test_prompts_that_are_trained_are_read_before_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = tokens(), model_of("gla_conv", "mamba2")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_attention_heads=1)
    found = adapted(model, config)
    asked, serves = [], CapturedSampling._serves

    def asking(self: Any, *arguments: Any) -> bool:
        asked.append(serves(self, *arguments))
        return False

    # As on a GPU, where nothing else would be in the way of a captured step, which reads the ids alone.
    monkeypatch.setattr("longrecall.inference.generation.why_no_graph", lambda _: None)
    monkeypatch.setattr(CapturedSampling, "_serves", asking)
    said = found.generate(input_ids=x, **GREEDY)
    model_of("gla").eval().generate(x, **GREEDY)
    assert asked == [False, True]
    by_hand = x
    with torch.no_grad():
        for _ in range(4):
            by_hand = torch.cat([by_hand, found(by_hand).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(said, by_hand)


def test_prefixes_of_keys_and_values_are_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=1, num_attention_heads=2)
    found = peft.get_peft_model(model_of("gla"), config)
    with pytest.raises(ValueError, match="past_key_values must be a RecurrentState"):
        found(tokens())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_of_transformers_trains_adapters_alone(checkpointing: bool, tmp_path: Path) -> None:
    found = peft.get_peft_model(model_of("gla", "mamba"), peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    before = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    trainer = trainer_of(tmp_path, found, learning_rate=0.01, gradient_checkpointing=checkpointing)
    trainer.train()
    moved = {name for name, tensor in found.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(model_of("gla", "mamba"), str(tmp_path / "adapter"))
    x = torch.tensor([ROWS[0]["input_ids"]])
    with torch.no_grad():
        assert torch.equal(again.eval()(x).logits, found.eval()(x).logits)


@pytest.mark.parametrize("first", ["longrecall", "peft.utils.constants"])
def test_the_order_of_imports_does_not_matter(first: str, tmp_path: Path) -> None:
    # In the place of PEFT, which takes seconds to import.
    names = ("LORA_TARGET", "IA3_TARGET", "LNTUNING_TARGET", "IA3_FEEDFORWARD")
    constants = tmp_path / "peft" / "utils" / "constants.py"
    constants.parent.mkdir(parents=True)
    for folder in (constants.parent, constants.parent.parent):
        (folder / "__init__.py").touch()
    constants.write_text("".join(f"TRANSFORMERS_MODELS_TO_{name}_MODULES_MAPPING = {{}}\n" for name in names))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import {first}, longrecall\n"
        "assert 'torch' not in sys.modules and ('peft' in sys.modules) == sys.argv[1].startswith('peft')\n"
        "from peft.utils import constants\n"
        "print([found for name, found in vars(constants).items() if name.startswith('TRANSFORMERS')])"
    )
    done = subprocess.run([sys.executable, "-c", code, first], capture_output=True, text=True)
    scaled = ["k_proj", "v_proj", "kv_b_proj", "i_proj", "in_proj", "down_proj"]
    expected = [{"longrecall": "all-linear"}, {"longrecall": scaled}, {}, {"longrecall": ["down_proj"]}]
    assert done.stdout.strip() == str(expected), done.stderr


def test_the_installed_version_of_peft_has_our_targets() -> None:
    from peft.utils import constants

    assert constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["longrecall"] == "all-linear"
    assert "longrecall" not in constants.TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING


ADAPTED_HYBRIDS: dict[str, tuple[str, ...]] = {
    "qwen": (),
    "nemotron": ("experts.up_proj", "experts.down_proj"),
    "falcon": (),
    "kimi": ("experts.gate_up_proj", "experts.down_proj"),
    "rwkv": (),
    "griffin": (),
}
"""Hybrid -> the stacked parameters of its experts, as docs/ecosystem.md names them."""


@pytest.mark.parametrize("name", ADAPTED_HYBRIDS)
def test_adapters_of_hybrids_train_come_back_and_merge(name: str, tmp_path: Path) -> None:
    """Every linear layer of every block and branch, and the experts where they are asked for."""
    experts, x = list(ADAPTED_HYBRIDS[name]), tokens()
    model = hybrid(name)
    linear = {key for key, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_parameters=experts or None)
    found = adapted(model, config)
    layers = {key for key, module in found.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    assert {key.removeprefix("base_model.model.") for key in layers} == linear
    trained = [key for key, parameter in found.named_parameters() if parameter.requires_grad]
    layers_of_experts = sum("moe" in str(layer) for layer in HYBRIDS[name]["layers"])
    assert sum(".experts." in key for key in trained) == 2 * len(experts) * layers_of_experts
    found.train()(x, labels=x).loss.backward()
    assert all(bool(found.get_parameter(key).grad.abs().sum() > 0) for key in trained)
    with torch.no_grad():
        together, said = found.eval()(x).logits, found.generate(input_ids=x, **GREEDY)
        found.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(hybrid(name).double(), str(tmp_path), autocast_adapter_dtype=False)
        torch.testing.assert_close(again.eval()(x).logits, together, rtol=1e-9, atol=1e-9)
        merged = found.merge_and_unload()
        torch.testing.assert_close(merged(x).logits, together, rtol=1e-9, atol=1e-9)
        assert torch.equal(merged.generate(x, **GREEDY), said)


def test_ia3_scales_keys_and_values_of_every_mixer_of_a_hybrid() -> None:
    found = adapted(hybrid("kimi"), peft.IA3Config(task_type="CAUSAL_LM"))
    scaled = {key.split(".layers.")[1] for key, parameter in found.named_parameters() if parameter.requires_grad}
    assert {"0.mixer.k_proj", "0.mixer.v_proj", "2.mixer.kv_b_proj"} <= {key.partition(".ia3")[0] for key in scaled}
    x = tokens()
    with torch.no_grad():
        together = found(x).logits
        torch.testing.assert_close(found.merge_and_unload()(x).logits, together, rtol=1e-9, atol=1e-9)
