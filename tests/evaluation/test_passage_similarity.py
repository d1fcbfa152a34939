"""How a model compares passages with a question, by its definition, and the prompts that use it through the CLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall.cli.main import main
from longrecall.evaluation.passage_similarity import PassageSimilarity
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from tests.conftest import MIXERS

PASSAGES, QUESTION = [[5, 6, 7], [9, 9], [40, 41, 42, 43], [7]], [6, 200]


def model_of(*kinds: str) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[kind], "mlp_size": 24} for kind in kinds]
    config = RecurrentConfig(vocab_size=258, hidden_size=32, layers=layers, context_length=64, initializer_range=0.2)
    return RecurrentLM(config).eval()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@torch.no_grad()
def test_the_encoders_of_the_first_retrieval_layer_decide() -> None:
    model = model_of("gla", "retrieval", "retrieval")
    layer, table = model.model.layers[1], model.model.embeddings.weight
    # Encoders and norms of their own: equal starts would hide which of them was taken.
    for part in (layer.mixer.query_encoder, layer.mixer_norm, layer.mlp_norm):
        part.weight.normal_()
    stream = model(torch.tensor([QUESTION]), output_hidden_states=True).hidden_states[1][0]
    queries = layer.mixer_norm(stream) @ layer.mixer.query_encoder.weight.T
    expected = []
    for passage in PASSAGES:
        rows = [table[token] / table[token].square().mean().sqrt() for token in passage]
        vector = layer.mixer.chunk_encoder.weight @ torch.stack(rows).mean(0)
        expected.append(max(cosine(vector, query) for query in queries))
    # float32 sums of 32 numbers in another order.
    assert PassageSimilarity(model)(PASSAGES, QUESTION) == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == len(PASSAGES)


@torch.no_grad()
def test_other_models_compare_mean_embeddings() -> None:
    model = model_of("gla")
    table = model.model.embeddings.weight
    expected = [cosine(table[passage].mean(0), table[QUESTION].mean(0)) for passage in PASSAGES]
    assert PassageSimilarity(model)(PASSAGES, QUESTION) == pytest.approx(expected, abs=1e-5)
    assert PassageSimilarity(model)(PASSAGES, [6])[0] > PassageSimilarity(model)(PASSAGES, [6])[1]


def test_nothing_to_compare() -> None:
    found = PassageSimilarity(model_of("retrieval"))
    assert found([], QUESTION) == [] and found(PASSAGES, []) == [0.0] * 4


@pytest.mark.parametrize("kind", ["gla", "retrieval"])
def test_prompts_with_passages_through_the_command_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(model_of(kind), tmp_path / "model", tokenizer=byte_tokenizer())
    rows = [
        {"context": f"Box {n} is red. " * 8, "question": f"Which colour has box {n}?", "answers": ["red"]}
        for n in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.json"
    words = ["eval", str(tmp_path / "model"), "--tasks", "question_answering", "--samples", "3", "--out", str(out)]
    options = {"datasets": "own", "data": tmp_path / "rows.jsonl", "prompts": "once,retrieval,rag", "metrics": "f1"}
    options |= {"passages": 2, "passage_tokens": 16, "answer_tokens": 4}
    for name, value in options.items():
        words += ["--option", f"question_answering.{name}={value}"]
    assert main(words) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(out.read_text())
    cells = {entry["cell"]["prompt"] for entry in result["results"] if entry["metric"] == "accuracy"}
    assert cells == {"once", "retrieval", "rag"}
    assert result["settings"]["options"]["question_answering"]["passages"] == 2
    assert main([*words[:6], "--option", "question_answering.passages=0"]) == 2
    assert "passages must be at least 1" in capsys.readouterr().err
