"""transformers' own Trainer on our models, as its users call it: what it computes is what it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from longrecall import RecurrentConfig, RecurrentLM, load
from longrecall.models.byte_tokenizer import byte_tokenizer
from tests.conftest import MIXERS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    # The tracer of torch.compile looks at the gradients of all tensors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

TOKENIZER = byte_tokenizer()
"""Pads on the left."""

ON_THE_RIGHT = byte_tokenizer()
ON_THE_RIGHT.padding_side = "right"
ROWS = [{"input_ids": list(range(5 + i, 11 + i + 3 * (i % 4)))} for i in range(16)]
"""Texts of 6, 9, 12 and 15 tokens by turns: batches have padding, and different numbers of labels."""


def model_of(*names: str, **changes: Any) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[name], "mlp_size": 16} for name in names or ("gla_conv", "mamba2")]
    return RecurrentLM(RecurrentConfig(**{"hidden_size": 32, "initializer_range": 0.2, **changes}, layers=layers))


def trainer_of(folder: Path, model: RecurrentLM | None = None, kind: Any = Trainer, **options: Any) -> Any:
    """A trainer of `kind`; options of the trainer and of its arguments together."""
    own = {"data_collator", "compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "train_dataset"}
    given = {name: options.pop(name) for name in own & options.keys()}
    settings = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no"} | options
    of = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    arguments = of(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    given = {"data_collator": DataCollatorForLanguageModeling(ON_THE_RIGHT, mlm=False), "train_dataset": ROWS} | given
    return kind(model or model_of(), arguments, eval_dataset=ROWS[:6], processing_class=TOKENIZER, **given)


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(model: RecurrentLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def plain_loss(model: RecurrentLM, rows: list[dict[str, list[int]]]) -> float:
    """Mean cross-entropy over the labels of texts that are read one by one."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            total += float(F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize("tokenizer", [TOKENIZER, ON_THE_RIGHT], ids=["left", "right"])
def test_evaluate_and_predict_with_metrics(tokenizer: Any, tmp_path: Path) -> None:
    def share_right(found: Any) -> dict[str, float]:
        real = found.label_ids[:, 1:] != -100
        return {"right": float((found.predictions[:, :-1] == found.label_ids[:, 1:])[real].mean())}

    model = model_of("gla", "mom")
    trainer = trainer_of(
        tmp_path,
        model,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        compute_metrics=share_right,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        per_device_eval_batch_size=4,
    )
    found = trainer.evaluate()
    model.eval()
    # Six texts in batches of four and two; Trainer weighs the means of batches by their rows.
    expected = (4 * plain_loss(model, ROWS[:4]) + 2 * plain_loss(model, ROWS[4:6])) / 6
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)  # float32 sums in another order
    assert 0 <= found["eval_right"] <= 1
    predicted = trainer.predict(ROWS[:6])
    assert predicted.predictions.shape == predicted.label_ids.shape == (6, 15)
    assert predicted.metrics["test_right"] == found["eval_right"]


def test_predictions_are_logits_without_metrics(tmp_path: Path) -> None:
    assert trainer_of(tmp_path).predict(ROWS[:6]).predictions.shape == (6, 15, 258)


# "mom_linear" has no balance: that is a product of two means over a batch, which does not add up from its parts.
@pytest.mark.parametrize("name", ["gla", "mom_linear"])
def test_accumulated_batches_train_as_one_batch(name: str, tmp_path: Path) -> None:
    """Trainer leaves the division to models whose forward pass takes more arguments than it names."""
    after, losses = [], []
    for rows, steps in ((8, 1), (2, 4)):
        model = model_of(name)
        options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "max_steps": 1}
        trainer = trainer_of(tmp_path, model, optim="sgd", learning_rate=0.5, max_grad_norm=0, **options)
        trainer.train()
        after.append(weights_of(model))
        losses += losses_of(trainer)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # float32 gradients in another order of sums, times a learning rate of 0.5.
    assert all(torch.allclose(after[0][key], after[1][key], atol=1e-5) for key in after[0])


def test_losses_of_layers_are_trained_and_not_evaluated(tmp_path: Path) -> None:
    model = model_of("mom").train()
    ids = torch.tensor([ROWS[3]["input_ids"], ROWS[7]["input_ids"]])
    plain = model(ids, labels=ids)
    counted = model(ids, labels=ids, num_items_in_batch=torch.tensor(56))
    # 28 of 56 labels are here: half of the mean of both losses.
    expected = (plain.loss + plain.auxiliary_loss) / 2
    assert plain.auxiliary_loss.item() > 0
    assert counted.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    evaluated = model.eval()(ids, labels=ids, num_items_in_batch=28)
    assert evaluated.loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-6)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path: Path) -> None:
    model = model_of().eval()
    ids = torch.tensor([ROWS[3]["input_ids"], ROWS[7]["input_ids"]])
    trainer = trainer_of(tmp_path, model, label_smoothing_factor=0.1)
    with torch.no_grad():
        found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("told", [{}, {"return_flash_attn_kwargs": True}], ids=["positions", "boundaries"])
def test_rows_without_padding_keep_their_texts_apart(told: dict[str, bool], tmp_path: Path) -> None:
    losses = []
    for collator in (DataCollatorForLanguageModeling(TOKENIZER, mlm=False), DataCollatorWithFlattening(**told)):
        trainer = trainer_of(tmp_path, model_of("gla_conv", "retrieval"), data_collator=collator)
        trainer.train()
        losses.append([*losses_of(trainer), trainer.evaluate()["eval_loss"]])
    # float32 sums in another order, over two steps of AdamW.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    after: list[dict[str, torch.Tensor]] = []
    for options in ({}, {"gradient_checkpointing": True}):
        model = model_of("gla", "mom", "retrieval")
        trainer_of(tmp_path, model, max_steps=1, **options).train()
        after.append(weights_of(model))
    assert all(torch.allclose(after[0][key], after[1][key], atol=1e-6) for key in after[0])


def test_reentrant_checkpoints_would_lose_the_gradients_of_a_carried_state() -> None:
    model = model_of("gla", "mom").train()
    ids, gradients = torch.tensor([ROWS[3]["input_ids"]]), []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        model.zero_grad()
        state = model(ids).past_key_values
        out = model(ids, past_key_values=state, labels=ids)
        (out.loss + out.auxiliary_loss).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_a_resumed_run_ends_bit_for_bit_where_the_whole_one_does(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = trainer_of(tmp_path, **options)
    whole.train()
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected, found = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    whole.save_model(str(tmp_path / "model"))
    assert load(tmp_path / "model").fingerprint() == whole.model.fingerprint()
    # Trainer writes use_cache=False into the config; generation reads on from the state all the same.
    lengths = []
    again = load(tmp_path / "model")
    again.model.layers[0].register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    again.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, eos_token_id=None)
    assert lengths == [3, 1, 1]


def test_the_best_model_comes_back(tmp_path: Path) -> None:
    # So large a rate makes the model worse with every step.
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, learning_rate=2.0, load_best_model_at_end=True, **options)
    trainer.train()
    seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(set(seen)) == 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(seen), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"auto_find_batch_size": True},
        {"train_sampling_strategy": "group_by_length"},
        {"neftune_noise_alpha": 5.0},
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow),
    ],
    ids=["bf16", "auto_find_batch_size", "group_by_length", "neftune", "torch_compile"],
)
def test_other_ways_of_training(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("gla", "mamba2"), **options)
    trainer.train()
    # With an untrained model of 258 tokens and weights of 0.2 the loss begins at about twice ln 258.
    assert all(math.isfinite(loss) and loss < 4 * math.log(258) for loss in losses_of(trainer))
    assert len(losses_of(trainer)) == 2
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_texts_are_generated_while_evaluating(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind=Seq2SeqTrainer, predict_with_generate=True, generation_max_length=20)
    assert trainer.predict(ROWS[:2]).predictions.shape == (2, 20)
