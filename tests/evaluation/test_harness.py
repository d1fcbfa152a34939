"""lm-evaluation-harness: its tasks on our models, scored as its own model does, and our tasks inside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import RecurrentLM
from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.evaluation import check_result, compare_files, evaluate
from longrecall.evaluation.harness import HarnessTask
from tests.evaluation.conftest import tiny_model
from tests.evaluation.test_questions import Speaker

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
# Of the packages that lm_eval brings, not of ours.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)

GENERATOR = """
import datasets
import random


def make(**settings):
    draws = random.Random(3)
    rows = []
    for index in range(13):
        words = " ".join(draws.choice(["river", "stone", "oak", "lamp"]) for _ in range(draws.randrange(1, 30)))
        choices = [draws.choice("abcdef") * draws.randrange(1, 6), "other", "x" + str(index)]
        rows.append({"words": words, "choices": choices, "answer": index % 3, "text": f"{words}. " * (index % 4 + 1)})
    return {"test": datasets.Dataset.from_list(rows)}
"""
HEAD = "custom_dataset: !function generator.make\ntest_split: test\nmetadata: {version: 2.0}\n"
TASKS = {
    "choice": """task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{words}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "likelihood": """task: tiny_likelihood
output_type: loglikelihood
doc_to_text: "{{words}}"
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "generate": """task: tiny_generate
output_type: generate_until
doc_to_text: "{{words}}\\nAnswer:"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["o", "\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
    "rolling": """task: tiny_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "sampled": """task: tiny_sampled
output_type: generate_until
doc_to_text: "{{words}}"
doc_to_target: "x"
generation_kwargs: {until: ["o"], do_sample: true, temperature: 0.7}
metric_list: [{metric: exact_match}]
""",
    "group": """group: tiny_group
task: [tiny_choice, tiny_likelihood]
""",
    "hub": """task: tiny_hub
dataset_path: nobody/no-such-data-set
output_type: generate_until
doc_to_text: "{{words}}"
doc_to_target: "x"
metric_list: [{metric: exact_match}]
""",
}
NAMES = ["tiny_choice", "tiny_likelihood", "tiny_generate", "tiny_rolling"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harness")
    (place / "generator.py").write_text(GENERATOR)
    for name, text in TASKS.items():
        head = {"hub": "test_split: test\n", "group": ""}.get(name, HEAD)
        (place / f"{name}.yaml").write_text(text + head)
    return place


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    place = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tiny_model().save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def bridge(model: Any, tokenizer: Any, folder: Path, names: list[str], samples: int = 100, **settings: Any) -> Any:
    options = {f"lm_eval:{name}": {"data": str(folder)} for name in names}
    tasks = list(options)
    return evaluate(model, tokenizer, tasks, [64], samples, options=options, progress=False, **settings)


def by_task(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(entry["task"].removeprefix("lm_eval:"), entry["metric"]): entry for entry in result["results"]}


def requests_of(folder: Path, name: str) -> list[Any]:
    from lm_eval.tasks import TaskManager

    task = TaskManager(include_path=str(folder), include_defaults=False).load([name])["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=100, rank=0, world_size=1)
    return list(task.instances)


KIND = {"tiny_choice": "loglikelihood", "tiny_likelihood": "loglikelihood", "tiny_generate": "generate_until"}
KIND["tiny_rolling"] = "loglikelihood_rolling"


@pytest.mark.parametrize("max_length", [None, 40])
def test_answers_equal_the_harness_own_model(
    model: RecurrentLM, tokenizer: Any, folder: Path, max_length: int | None
) -> None:
    from lm_eval.models.huggingface import HFLM

    from longrecall.evaluation.harness.language_model import LongrecallLM

    # 8192 is longer than every text here, and HFLM needs some length.
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length or 8192, batch_size=3)
    ours = LongrecallLM(model, tokenizer=tokenizer, max_length=max_length)
    for name in NAMES:
        requests = requests_of(folder, name)
        expected = getattr(theirs, KIND[name])(requests)
        found = getattr(ours, KIND[name])(requests, disable_tqdm=True)
        if name == "tiny_generate":
            assert found == expected
            assert len(set(found)) > 3
            continue
        flat = [(value if isinstance(value, tuple) else (value, None)) for value in expected]
        mine = [(value if isinstance(value, tuple) else (value, None)) for value in found]
        # Sums of up to 600 float32 losses, each within 1e-5 of the other computation's.
        assert [value for value, _ in mine] == pytest.approx([value for value, _ in flat], rel=1e-5, abs=1e-4)
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in flat]


@pytest.mark.parametrize("name", NAMES)
def test_batches_change_nothing(model: RecurrentLM, tokenizer: Any, folder: Path, name: str) -> None:
    from longrecall.evaluation.harness.language_model import LongrecallLM

    requests = requests_of(folder, name)
    answers = [
        getattr(LongrecallLM(model, tokenizer=tokenizer, batch_size=size, segment_tokens=segment), KIND[name])(
            requests, disable_tqdm=True
        )
        for size, segment in ((1, 2048), (2, 2048), (7, 2048), (7, 16))
    ]
    for other in answers[1:]:
        if name == "tiny_generate":
            assert other == answers[0]
        elif name == "tiny_rolling":
            assert other == pytest.approx(answers[0], rel=1e-6)  # float32 sums in another order
        else:
            assert [greedy for _, greedy in other] == [greedy for _, greedy in answers[0]]
            assert [v for v, _ in other] == pytest.approx([v for v, _ in answers[0]], rel=1e-6)


def test_greedy_is_what_the_model_would_say(model: RecurrentLM, tokenizer: Any, folder: Path) -> None:
    from lm_eval.api.instance import Instance

    from longrecall.evaluation.harness.language_model import LongrecallLM

    # Only printable characters: a logit of 0 never wins against 94 random ones. So what is said is a text.
    with torch.no_grad():
        model.lm_head.weight[:33] = model.lm_head.weight[127:] = 0.0
    lm = LongrecallLM(model, tokenizer=tokenizer)
    prompts = requests_of(folder, "tiny_generate")
    said = lm.generate_until(prompts, disable_tqdm=True)
    pairs = [(request.args[0], text) for request, text in zip(prompts, said, strict=True) if text]
    assert len(pairs) > 8
    likely = [Instance("loglikelihood", {}, pair, 0, ("t", i, 1)) for i, pair in enumerate(pairs)]
    assert all(greedy for _, greedy in lm.loglikelihood(likely, disable_tqdm=True))
    other = [
        Instance("loglikelihood", {}, (before, text[:-1] + ("~" if text[-1] != "~" else "!")), 0, ("t", i, 1))
        for i, (before, text) in enumerate(pairs)
    ]
    assert not any(greedy for _, greedy in lm.loglikelihood(other, disable_tqdm=True))


def test_scores_equal_the_harness_own_evaluation(model: RecurrentLM, tokenizer: Any, folder: Path) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=8192, batch_size=4)
    expected = lm_eval.simple_evaluate(lm, tasks=NAMES, task_manager=manager, bootstrap_iters=0, limit=11)["results"]
    result = bridge(model, tokenizer, folder, NAMES, samples=11)
    check_result(result, "here")
    found = by_task(result)
    assert len(found) == 8
    for (name, metric), entry in found.items():
        assert entry["value"] == pytest.approx(expected[name][f"{metric},none"], rel=1e-4)
        assert entry["count"] == 11 and entry["available"] == 13 and entry["version"] == "2.0"
        if entry["low"] is not None:
            assert entry["low"] <= entry["value"] <= entry["high"] and entry["low"] < entry["high"]
    assert found["tiny_choice", "acc"]["outcomes"]["units"] == 11
    assert found["tiny_rolling", "bits_per_byte"]["low"] is not None
    assert found["tiny_likelihood", "perplexity"]["stderr"] > 0
    assert result["settings"]["options"]["lm_eval:tiny_choice"]["data"]["lm_eval"] == lm_eval.__version__


def test_documents_with_logits_that_are_not_finite_are_counted(tokenizer: Any, folder: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        # Only documents with this letter meet it.
        model.get_input_embeddings().weight[ord("v")] = float("nan")
    found = by_task(bridge(model, tokenizer, folder, NAMES))
    with_river = sum("river" in request.args[0] for request in requests_of(folder, "tiny_generate"))
    assert 0 < with_river < 13
    for entry in found.values():
        assert entry["diverged"] == with_river
    assert found["tiny_rolling", "bits_per_byte"]["value"] is None
    assert found["tiny_choice", "acc"]["value"] is not None


def test_a_killed_run_goes_on(
    model: RecurrentLM, tokenizer: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longrecall.evaluation.harness.job import HarnessJob

    whole = by_task(bridge(model, tokenizer, folder, ["tiny_generate"]))
    out, run = tmp_path / "result.json", HarnessJob.run
    asked: list[int] = []

    def killed(self: HarnessJob, indexes: Any, advance: Any) -> Any:
        yield from run(self, indexes[:5], advance)
        raise KeyboardInterrupt

    def counted(self: HarnessJob, indexes: Any, advance: Any) -> Any:
        asked.extend(indexes)
        yield from run(self, indexes, advance)

    monkeypatch.setattr(HarnessJob, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        bridge(model, tokenizer, folder, ["tiny_generate"], out=out)
    monkeypatch.setattr(HarnessJob, "run", counted)
    again = by_task(bridge(model, tokenizer, folder, ["tiny_generate"], out=out, resume=True))
    assert asked == list(range(5, 13))
    key = ("tiny_generate", "exact_match")
    assert {**again[key], "seconds": 0} == {**whole[key], "seconds": 0}


def test_the_verb_runs_both_kinds_of_tasks(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = [
        "eval",
        str(checkpoint),
        "--tasks",
        "lm_eval:tiny_choice,phonebook",
        "--lengths",
        "64",
        "--samples",
        "8",
    ]
    arguments += ["--option", f"lm_eval:tiny_choice.data={folder}", "--option", "lm_eval:tiny_choice.shots=2"]
    arguments += ["--pairs", "2", "--out", str(out)]
    assert main(arguments) == 0
    result = json.loads(out.read_text())
    check_result(result, str(out))
    assert {entry["task"] for entry in result["results"]} == {"lm_eval:tiny_choice", "phonebook"}
    assert result["settings"]["options"]["lm_eval:tiny_choice"]["shots"] == 2
    assert "lm_eval:tiny_choice.acc" in result["summary"]


@pytest.mark.parametrize("index", ["own", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_group_can_be_compared(
    model: RecurrentLM, tokenizer: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    """`own`: beside the group's folder the harness finds no tasks. To read its thousands of files takes seconds."""
    if index == "own":
        monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py"))
    out = tmp_path / "group.json"
    entries = bridge(model, tokenizer, folder, ["tiny_group"], samples=3, out=out)["results"]
    assert {entry["part_of"] for entry in entries} == {"lm_eval:tiny_group"}
    comparison = compare_files(out, out)
    assert {row["task"] for row in comparison["results"]} == {"lm_eval:tiny_choice", "lm_eval:tiny_likelihood"}


def test_text_ends_at_a_stop_or_at_its_number_of_tokens(tokenizer: Any) -> None:
    from lm_eval.api.instance import Instance

    from longrecall.evaluation.harness.language_model import LongrecallLM

    def counts_up(text: str) -> str:
        return chr(ord(text[-1]) + 1)

    settings: list[dict[str, Any]] = [
        {"until": ["ef", "h"], "max_gen_toks": 9},
        {"until": ["ef", "h"], "max_gen_toks": 3},
        {"until": "d", "max_gen_toks": 9},
        {"until": [], "max_gen_toks": 5},
    ]
    requests = [Instance("generate_until", {}, ("..a", each), 0, ("t", i, 1)) for i, each in enumerate(settings)]
    said = LongrecallLM(Speaker(counts_up), tokenizer=tokenizer).generate_until(requests, disable_tqdm=True)
    assert said == ["bcd", "bcd", "bc", "bcdef"]


def test_long_contexts_are_read_in_segments_and_once(
    model: RecurrentLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance

    from longrecall.evaluation.harness.language_model import LongrecallLM

    read: list[tuple[int, int]] = []
    forward = RecurrentLM.forward

    def counted(self: RecurrentLM, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(tuple(input_ids.shape))
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(RecurrentLM, "forward", counted)
    context = "what was before " * 300
    options = [Instance("loglikelihood", {}, (context, f" {word}"), i, ("t", 0, 1)) for i, word in enumerate("abcd")]
    found = LongrecallLM(model, tokenizer=tokenizer, segment_tokens=128).loglikelihood(options, disable_tqdm=True)
    assert len({value for value, _ in found}) == 4
    # A document alone is read in segments of 1024; four options of two tokens each come after its 4800.
    assert max(columns for _, columns in read) <= 1024
    assert sum(rows * columns for rows, columns in read) < 4800 + 4 * 8
    read.clear()
    said = Instance("generate_until", {}, (context, {"until": [], "max_gen_toks": 4}), 0, ("t", 0, 1))
    LongrecallLM(model, tokenizer=tokenizer).generate_until([said], disable_tqdm=True)
    assert max(columns for _, columns in read) <= 1024


def test_the_device_that_nobody_named_is_that_of_the_harness() -> None:
    from lm_eval.config.evaluate_config import EvaluatorConfig

    from longrecall.evaluation.harness.language_model import UNNAMED_DEVICE

    assert EvaluatorConfig().device == UNNAMED_DEVICE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_was_named_and_is_missing_is_an_error(checkpoint: Path) -> None:
    from longrecall.evaluation.harness.language_model import LongrecallLM

    with pytest.raises(UserError, match='device "cuda" cannot be used'):
        LongrecallLM(str(checkpoint), device="cuda")


def test_a_fresh_process_knows_the_models_of_the_harness_and_ours() -> None:
    code = (
        "import longrecall\n"
        "from lm_eval.api.registry import get_model, model_registry\n"
        # This model needs the least imports.
        "print(get_model('dummy').__name__, 'hf' in model_registry, 'longrecall' in model_registry)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["DummyLM", "True", "True"], done.stderr


def test_the_command_leaves_the_models_of_the_harness_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness registers its own only where nothing is registered yet."""
    import lm_eval.__main__ as command
    import lm_eval.models  # noqa: F401 (for the tests after this one, which put it back)
    from lm_eval.api.registry import get_model, model_registry

    from longrecall.evaluation.harness.__main__ import main as run

    monkeypatch.setattr(model_registry, "_objs", {})
    monkeypatch.delitem(sys.modules, "lm_eval.models")
    found: list[Any] = []
    monkeypatch.setattr(command, "cli_evaluate", lambda: found.append(get_model("dummy")))
    monkeypatch.setattr(sys, "argv", ["harness", "--model", "dummy"])
    assert run() == 0 and found[0].__name__ == "DummyLM"
    assert sys.argv[-2] == "--include_path"


def test_the_harness_loads_native_checkpoints(checkpoint: Path, folder: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    values = []
    for name in ("longrecall", "hf"):
        found = lm_eval.simple_evaluate(
            name,
            model_args={"pretrained": str(checkpoint)},
            tasks=["tiny_choice", "tiny_likelihood"],
            task_manager=manager,
            # What the command passes on where nobody names a device; the harness's own model minds it no more.
            device="cuda:0",
            batch_size=2,
            bootstrap_iters=0,
        )["results"]
        values.append([found["tiny_choice"]["acc,none"], found["tiny_likelihood"]["perplexity,none"]])
    # Both sum float32 losses; hf reads whole rows, ours the context first.
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_seed_zero_is_the_harness_default_and_generators_are_put_back() -> None:
    import random

    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    from longrecall.evaluation.harness.loading import quiet_and_seeded

    before = random.getstate()
    with quiet_and_seeded(0):
        drawn = random.random(), torch.rand(()).item()
    assert random.getstate() == before
    expected = random.Random(DEFAULT_RANDOM_SEED).random()
    assert drawn == (expected, torch.rand((), generator=torch.Generator().manual_seed(DEFAULT_OTHER_SEED)).item())


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(tmp_path), "--tasks", "lm_eval:piqa"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert 'pip install "lm-eval>=' in line


def test_bad_input(model: RecurrentLM, tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    with pytest.raises(UserError, match=r'no task "tiny_choise".* Did you mean "tiny_choice"'):
        HarnessTask.create("lm_eval:tiny_choise", data=str(folder))
    with pytest.raises(UserError, match=r'no task "pika".* Did you mean'):
        HarnessTask.create("lm_eval:pika")
    with pytest.raises(UserError, match=r'no option "shot".* Did you mean "shots"'):
        HarnessTask.create("lm_eval:tiny_choice", shot=2)
    with pytest.raises(UserError, match="max_length must be at least 2"):
        HarnessTask.create("lm_eval:tiny_choice", data=str(folder), max_length=1)
    with pytest.raises(UserError, match="is not a folder"):
        HarnessTask.create("lm_eval:tiny_choice", data=str(folder / "none"))
    with pytest.raises(UserError, match="samples its answers"):
        bridge(model, tokenizer, folder, ["tiny_sampled"])
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match='tiny_hub: its data set "nobody/no-such-data-set" cannot be loaded') as caught:
        bridge(model, tokenizer, folder, ["tiny_hub"])
    assert "\n" not in str(caught.value)
