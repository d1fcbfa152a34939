"""The engine: the tokens of generate(), whoever else is there; limits, and how requests end."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longrecall import Engine
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.serving import Overloaded, RequestOptions
from longrecall.serving.reading import Job
from longrecall.serving.request import CANCELLED, LENGTH, STOP, Closed, Request
from longrecall.serving.sampling import Sampling
from longrecall.serving.worker import Worker
from tests.conftest import MIXERS

MODELS: dict[str, list[str]] = {
    "gla": ["gla", "gla_conv"],
    "gated_delta_net": ["gated_delta_net", "gated_delta_net"],
    "mamba2": ["mamba2", "mamba2"],
    "hybrid": ["gated_delta_net", "attention", "attention_window"],
}


def model_of(name: str, vocabulary: int = 40) -> RecurrentLM:
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS[mixer], "mlp_size": 24} for mixer in MODELS[name]]
    model = RecurrentLM(RecurrentConfig(vocab_size=vocabulary, hidden_size=32, layers=layers)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def prompts_of(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(40) for _ in range(chance.randint(1, longest))] for _ in range(count)]


@torch.no_grad()
def generated(model: RecurrentLM, prompt: list[int], count: int, **options: Any) -> list[int]:
    found: torch.Tensor = model.generate(
        torch.tensor([prompt], device=model.device), **({"do_sample": False, "max_new_tokens": count} | options)
    )
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def gla() -> RecurrentLM:
    return model_of("gla")


@pytest.fixture
def engine(gla: RecurrentLM) -> Iterator[Engine]:
    with Engine(gla, slots=3, queue=2) as found:
        yield found


@pytest.mark.parametrize("name", [*MODELS, "as on a GPU"])
def test_tokens_are_those_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come at random moments and are of all lengths; prompts are read in several segments.

    As on a GPU: a token is told while the next one is under way, and sequences move to fill the first rows.
    """
    if name not in MODELS:
        name = "gla"
        monkeypatch.setattr("longrecall.serving.worker.LAGGING", ("cpu",))
        monkeypatch.setattr("longrecall.inference.slots.MOST_RECORDED", 0)
    model, prompts, chance = model_of(name), prompts_of(14), random.Random(1)
    wanted = [1 + 3 * index % 17 for index in range(len(prompts))]
    with Engine(model, slots=4, queue=100, segment=16) as engine:
        requests = []
        for prompt, count in zip(prompts, wanted, strict=True):
            requests.append(engine.submit(prompt, max_new_tokens=count))
            time.sleep(chance.choice((0, 0, 0.004)))
        found = [request.result().ids for request in requests]
    assert found == [generated(model, prompt, count) for prompt, count in zip(prompts, wanted, strict=True)]


def test_more_room_while_others_write() -> None:
    """A hybrid's slots get room for a longer request; the running ones go on."""
    model, (first, second) = model_of("hybrid"), prompts_of(2)
    with Engine(model, slots=2, room=600) as engine:
        long = engine.submit(first, max_new_tokens=60)
        next(long.tokens())
        longer = engine.submit(second * 20, max_new_tokens=6)
        assert longer.result().ids == generated(model, second * 20, 6)
        assert long.result().ids == generated(model, first, 60)
        with pytest.raises(UserError, match=r"takes 601 tokens .* holds 600"):
            engine.submit([1], max_new_tokens=600)


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.1},
    {"repetition_penalty": 1.5},
]


def test_sampling_does_not_depend_on_neighbours(gla: RecurrentLM) -> None:
    prompts = prompts_of(10)
    options = [SAMPLED[index % len(SAMPLED)] | {"seed": index, "max_new_tokens": 12} for index in range(10)]
    with Engine(gla, slots=1) as engine:
        alone = [engine.submit(p, **o).result().ids for p, o in zip(prompts, options, strict=True)]
    with Engine(gla, slots=6, queue=100) as engine:
        requests = [engine.submit(p, **o) for p, o in zip(prompts, options, strict=True)]
        assert [request.result().ids for request in requests] == alone
        again = engine.submit(prompts[0], temperature=1.0, max_new_tokens=12).result().ids
        other = engine.submit(prompts[0], temperature=1.0, max_new_tokens=12).result().ids
    assert again != other, "without a seed every request draws numbers of its own"


def test_penalised_tokens_are_those_of_generate(gla: RecurrentLM, engine: Engine) -> None:
    for prompt in prompts_of(3):
        found = engine.submit(prompt, repetition_penalty=1.4, max_new_tokens=15).result().ids
        assert found == generated(gla, prompt, 15, repetition_penalty=1.4)


def test_stop_tokens_and_reasons(gla: RecurrentLM, engine: Engine) -> None:
    prompt = [1, 2, 3]
    whole = generated(gla, prompt, 12)
    result = engine.submit(prompt, max_new_tokens=12, stop_tokens=(whole[5],)).result()
    assert result.ids == whole[: whole.index(whole[5]) + 1] and result.finish_reason == STOP
    assert engine.submit(prompt, max_new_tokens=12).result().finish_reason == LENGTH


def test_the_models_own_end() -> None:
    model = model_of("gla")
    whole = generated(model, [1, 2, 3], 12)
    model.generation_config.eos_token_id = whole[4]  # type: ignore[union-attr]
    with Engine(model, slots=2) as engine:
        assert engine.submit([1, 2, 3], max_new_tokens=12).result().ids == generated(
            model, [1, 2, 3], 12, pad_token_id=0
        )
        assert engine.submit([1, 2, 3], max_new_tokens=12, ignore_end=True).result().ids == whole


def test_logprobs(gla: RecurrentLM, engine: Engine) -> None:
    result = engine.submit([5, 6], max_new_tokens=4, logprobs=3).result()
    with torch.no_grad():
        table = gla(torch.tensor([[5, 6, *result.ids]])).logits[0, 1:-1].log_softmax(-1)
    for row, token, told in zip(table, result.ids, result.logprobs, strict=True):
        # float32 sums in another order.
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [place for place, _ in told.top] == row.topk(3).indices.tolist()


def test_text_streams_and_stop_strings() -> None:
    """Bytes of random weights are seldom whole characters: pieces add up to the text all the same."""
    model = model_of("gla", vocabulary=258)
    with Engine(model, byte_tokenizer(), slots=3) as engine:
        seen: list[int] = []
        request = engine.submit("abc", max_new_tokens=90, ignore_end=True, on_token=seen.append)
        pieces = list(request.pieces())
        assert "".join(pieces) == request.text() and len(pieces) > 5
        assert seen == request.result().ids == list(request.tokens())
        text = engine.submit("abc", max_new_tokens=90, temperature=3.0, seed=4, top_p=0.9).text()
        stop = text[20:23]
        cut = engine.submit("abc", max_new_tokens=90, temperature=3.0, seed=4, top_p=0.9, stop=(stop, "never there"))
        assert "".join(cut.pieces()) == cut.text() == text[: text.index(stop)]
        assert cut.result().finish_reason == STOP

        async def read() -> str:
            return "".join([piece async for piece in engine.submit("abc", max_new_tokens=90, ignore_end=True)])

        assert asyncio.run(read()) == request.text()


def test_a_cancelled_request_frees_its_slot(gla: RecurrentLM) -> None:
    with Engine(gla, slots=1, queue=2) as engine:
        endless = engine.submit([1], max_new_tokens=10**6)
        waiting = engine.submit([2], max_new_tokens=10**6)
        last = engine.submit([3], max_new_tokens=2)
        next(endless.tokens())
        waiting.cancel()
        assert not last.done
        endless.cancel()
        assert last.result(timeout=60).ids == generated(gla, [3], 2)
        assert endless.result().finish_reason == waiting.result().finish_reason == CANCELLED
        assert endless.ids == generated(gla, [1], len(endless.ids)) and not waiting.ids


def test_cancelled_requests_do_not_wait(gla: RecurrentLM) -> None:
    """Clients come and go behind one who waits for the only slot."""
    with Engine(gla, slots=1, queue=2) as engine:
        endless, waiting = (engine.submit([1], max_new_tokens=10**6) for _ in range(2))
        next(endless.tokens())
        for _ in range(20):
            engine.submit([2]).cancel()
        assert engine.load()["waiting"] == 1 and not waiting.done


def test_an_event_loop_that_leaves_cancels(engine: Engine) -> None:
    request = engine.submit([1], max_new_tokens=10**6)

    async def leave() -> None:
        waiting = asyncio.ensure_future(request.wait())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(leave())
    assert request.result().finish_reason == CANCELLED


def test_too_many_requests_are_refused(engine: Engine) -> None:
    requests = [engine.submit([1], max_new_tokens=10**6) for _ in range(5)]
    with pytest.raises(Overloaded, match=r"3 slots .* 2 requests wait"):
        engine.submit([1])
    for request in requests:
        request.cancel()
    assert len(engine.submit([1], max_new_tokens=3).result(timeout=60).ids) == 3


def test_generate_waits_for_the_queue(gla: RecurrentLM, engine: Engine) -> None:
    prompts = prompts_of(12)
    assert [x.ids for x in engine.generate(prompts, max_new_tokens=5)] == [generated(gla, p, 5) for p in prompts]


@pytest.mark.parametrize(("order", "expected"), [("arrival", [2, 6, 5, 6]), ("longest", [6, 6, 5, 2])])
def test_whose_turn_it_is(gla: RecurrentLM, order: str, expected: list[int]) -> None:
    """While the only slot is taken others come; they get it in this order. The answers are the same."""
    begun: list[int] = []
    all_here = threading.Event()

    def told(number: int, token: int) -> None:
        begun.append(number)

    with Engine(gla, slots=1, queue=8, order=order) as engine:
        first = engine.submit([3, 4], max_new_tokens=2, ignore_end=True, on_token=lambda _: all_here.wait(30) or None)
        requests = [
            engine.submit([number, 7], max_new_tokens=count, ignore_end=True, on_token=partial(told, number))
            for number, count in enumerate((2, 6, 5, 6))
        ]
        all_here.set()
        found = [request.result().ids for request in (first, *requests)]
    turns = list(dict.fromkeys(begun))
    assert [(2, 6, 5, 6)[number] for number in turns] == expected
    assert order == "arrival" or turns == [1, 3, 2, 0]  # of equals the first that came
    assert found[1] == generated(gla, [0, 7], 2)


def test_nobody_waits_longer_than_a_segment(gla: RecurrentLM) -> None:
    """A token of those who write between any two segments; short prompts overtake a long one."""
    worker = Worker(gla, 3, 16, 0)
    given = ([1], 30), ([2] * 160, 2), ([3], 4)
    requests = [Request(prompt, RequestOptions(max_new_tokens=count)) for prompt, count in given]
    jobs = [Job(request, Sampling(request.options, request.prompt, 40, gla.device)) for request in requests]
    worker.add(jobs[0])
    worker.work()
    worker.add(jobs[1])
    worker.work()
    worker.add(jobs[2])
    before = len(requests[0].ids)
    for turn in range(1, 10):
        worker.work()
        assert len(requests[0].ids) == before + turn and jobs[1].read <= 16 * (turn + 1)
    assert requests[2].done and not requests[1].ids
    while worker.busy:
        worker.work()
        worker.drop_ended()
    assert [request.ids for request in requests] == [generated(gla, prompt, count) for prompt, count in given]


def test_a_callback_that_fails_is_its_callers_own(engine: Engine) -> None:
    def fail(token: int) -> None:
        raise KeyError(token)

    other = engine.submit([2], max_new_tokens=20)
    with pytest.raises(KeyError):
        engine.submit([1], max_new_tokens=20, on_token=fail).result()
    assert len(other.result().ids) == 20


def test_many_threads(gla: RecurrentLM) -> None:
    prompts = prompts_of(6)
    found: dict[int, list[int]] = {}
    with Engine(gla, slots=2) as engine:

        def ask(index: int) -> None:
            found[index] = engine.submit(prompts[index], max_new_tokens=6).result().ids

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[index] for index in range(len(prompts))] == [generated(gla, prompt, 6) for prompt in prompts]


def test_closing(gla: RecurrentLM) -> None:
    engine = Engine(gla, slots=1)
    given = [engine.submit([token], max_new_tokens=5) for token in (1, 2, 3)]
    engine.close(finish=True)
    assert all(request.result().finish_reason == LENGTH for request in given)
    with pytest.raises(Closed):
        engine.submit([1])
    engine.close()
    engine = Engine(gla, slots=1)
    endless = engine.submit([2], max_new_tokens=10**6)
    engine.close(finish=True, timeout=0.05)
    assert endless.result().finish_reason == CANCELLED


@pytest.mark.timeout(120)
def test_a_callback_may_close_but_not_wait_for_answers(gla: RecurrentLM) -> None:
    """It runs in the thread that they come from."""
    engine = Engine(gla, slots=1)
    with pytest.raises(UserError, match="another thread than on_token's"):
        engine.submit([1], max_new_tokens=5, on_token=lambda _: engine.close(finish=True)).result(timeout=60)
    with pytest.raises(UserError, match="another thread than on_token's"):
        engine.submit([1], on_token=lambda _: engine.generate([[2]])).result(timeout=60)  # type: ignore[arg-type]
    request = engine.submit([1], max_new_tokens=5, on_token=lambda _: engine.close())
    assert request.result(timeout=60).finish_reason == CANCELLED
    engine.close()


def test_closing_while_a_text_for_the_bank_waits(gla: RecurrentLM, tmp_path: Path) -> None:
    engine = Engine(gla, slots=1, bank=tmp_path)
    endless, failed = engine.submit([1], max_new_tokens=10**6), []
    next(endless.tokens())

    def add() -> None:
        try:
            engine.bank.add("book", [1, 2, 3])  # type: ignore[union-attr]
        except Closed as error:
            failed.append(str(error))

    thread = threading.Thread(target=add)
    thread.start()
    while not engine.load()["waiting"]:
        time.sleep(0.001)
    engine.close()
    thread.join(timeout=60)
    assert failed == ["the engine was closed before the text had been read"]
    assert list(tmp_path.glob("*")) == []


def test_a_loop_that_closes_while_it_is_told_is_nobody_elses_error(
    gla: RecurrentLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(gla, slots=2) as engine:
        other = engine.submit([2], max_new_tokens=400)
        request, loop = engine.submit([1], max_new_tokens=10**6), asyncio.new_event_loop()
        changes = request.changes()
        loop.run_until_complete(anext(changes))  # type: ignore[arg-type]
        loop.close()
        # As if it had been closed just after the engine's look at it.
        with monkeypatch.context() as patch:
            patch.setattr(loop, "is_closed", lambda: False)
            assert len(other.result(timeout=60).ids) == 400
            request.cancel()
            request.result()


def test_a_closed_engine_has_no_slots(gla: RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is for others, also while the engine is kept."""
    made: list[weakref.ref[Worker]] = []
    monkeypatch.setattr("longrecall.serving.engine.Worker", lambda *given: kept(Worker(*given), made))
    with Engine(gla, slots=1) as engine:
        engine.submit([1], max_new_tokens=2).result()
    gc.collect()
    assert made[0]() is None and engine.load()["running"] == 0


def kept(worker: Worker, made: list[weakref.ref[Worker]]) -> Worker:
    made.append(weakref.ref(worker))
    return worker


def test_an_engine_that_nobody_holds_ends(gla: RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrecall.serving.engine.IDLE", 0.02)
    engine = Engine(gla, slots=1)
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_logits_that_are_no_numbers() -> None:
    """The request fails in one line; the engine goes on."""
    model = model_of("gla")
    with Engine(model, slots=2) as engine:
        with torch.no_grad():
            model.model.embeddings.weight[7] = torch.nan
            with pytest.raises(UserError, match="NaN or infinite"):
                engine.submit([1, 7], max_new_tokens=3).result()
            model.model.embeddings.weight[7] = 0
        assert len(engine.submit([1, 2], max_new_tokens=3).result().ids) == 3


def test_a_step_that_fails_ends_those_in_it(gla: RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait are answered; so are later ones."""
    with Engine(gla, slots=1) as engine:
        endless = engine.submit([1], max_new_tokens=10**6)
        waiting = engine.submit([2], max_new_tokens=5)
        next(endless.tokens())
        broken, whole = threading.Event(), Worker._decode

        def once(worker: Worker) -> None:
            if not broken.is_set():
                broken.set()
                raise RuntimeError("no memory")
            whole(worker)

        monkeypatch.setattr(Worker, "_decode", once)
        with pytest.raises(RuntimeError, match="no memory"):
            endless.result(timeout=60)
        assert waiting.result(timeout=60).ids == generated(gla, [2], 5)


def test_what_fails_at_the_start_is_told_there(gla: RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(worker: Worker) -> None:
        raise torch.OutOfMemoryError("too many slots")

    monkeypatch.setattr(Worker, "prepare", prepare)
    with pytest.raises(torch.OutOfMemoryError, match="too many"):
        Engine(gla, slots=1)


def test_what_must_not_happen_leaves_nobody_waiting(gla: RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "drop_ended", lambda worker: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = Engine(gla, slots=1)
    try:
        with pytest.raises((RuntimeError, Closed), match="failed: ZeroDivisionError"):
            engine.submit([1]).result(timeout=60)
        assert engine.broken
    finally:
        engine.close()


def test_beginnings_that_prompts_share(gla: RecurrentLM) -> None:
    """The third prompt with a beginning goes on from its state; tokens are those without."""
    begin = prompts_of(1, seed=5)[0] * 60
    prompts = [begin[:600] + more for more in ([1, 2], [3], [4, 5, 6])]
    with Engine(gla, slots=2, prefix_bytes=0) as plain:
        expected = [plain.submit(prompt, max_new_tokens=8).result() for prompt in prompts]
    with Engine(gla, slots=2, segment=300) as engine:
        found = [engine.submit(prompt, max_new_tokens=8).result() for prompt in prompts]
    assert [result.ids for result in found] == [result.ids for result in expected]
    assert [result.cached_tokens for result in found] == [0, 0, 512]
    assert [result.cached_tokens for result in expected] == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [40]}, "token 40"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"stop": "x"}, "stop_tokens"),
        ({"after": "book"}, "no bank"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"beams": 3}, 'no such option "beams"'),
        ({"temperatur": 1}, 'Did you mean "temperature"'),
    ],
)
def test_bad_requests_are_refused_at_once(engine: Engine, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        engine.submit(**({"prompt": [1]} | given))


def test_bad_engines(gla: RecurrentLM) -> None:
    with pytest.raises(UserError, match="slots must be"):
        Engine(gla, slots=0)
    with pytest.raises(UserError, match="order must be one of arrival, longest, got 'shortest'"):
        Engine(gla, order="shortest")
    torch.manual_seed(0)
    layers = [{"mixer": MIXERS["hyena"]}]
    with pytest.raises(UserError, match=r"slots: layer 0 \(hyena\)"):
        Engine(RecurrentLM(RecurrentConfig(vocab_size=8, hidden_size=32, layers=layers)).eval())


def test_options_are_checked_when_they_are_made() -> None:
    assert RequestOptions(stop="x").stop == ("x",)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed"):
        RequestOptions(seed=1.5)  # type: ignore[arg-type]


def many_requests(model: RecurrentLM, count: int) -> int:
    """Bytes of tensors that are left of so many requests."""
    with Engine(model, slots=16, queue=1000, prefix_bytes=1 << 20) as engine:
        engine.generate(prompts_of(50), max_new_tokens=3, temperature=1.0)
        gc.collect()
        before = len(gc.get_objects())
        for seed in range(count // 500):
            engine.generate(
                prompts_of(500, longest=4, seed=seed), max_new_tokens=2, temperature=1.0, repetition_penalty=1.1
            )
        gc.collect()
        return len(gc.get_objects()) - before


def test_requests_leave_nothing_behind(gla: RecurrentLM) -> None:
    # Some objects of threads and caches; a request that stayed would leave tens of them.
    assert many_requests(gla, 500) < 500


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(gla: RecurrentLM) -> None:
    assert many_requests(gla, 10_000) < 500
