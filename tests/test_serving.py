"""An engine process, in a thread: the real trainer and samplers on a tiny model, through the real connection."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from serving_client import KEY, FrontEnd, create, data, fb, optim, sample, sampler
from tiny import CONFIG, tiny_tokenizer, write_tiny_model

from locojax.hosts.protocol import (
    CloseSampler,
    EngineStatus,
    Failed,
    ForwardBackward,
    LoadWeights,
    ModelState,
    RemoveModel,
    RestoreModel,
    Sample,
    SaveAdapter,
    SaveState,
    Tokens,
)
from locojax.hosts.serving import run_engine
from locojax.hosts.serving_settings import ServeSettings
from locojax.models.executables import Executables
from locojax.models.peft import load_adapter
from locojax.models.spec import ModelSpec
from locojax.server import openai
from locojax.server.openai_requests import CompletionRequest, plan_completion
from locojax.types import Datum, SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The address of an engine; every test makes models and samplers of its own."""
    folder = tmp_path_factory.mktemp("serving")
    settings = ServeSettings(
        str(write_tiny_model(folder / "tiny")), name="tiny", max_adapters=4, max_rank=8, row_tokens=32, rows=2,
        compute_dtype="float32", sample_dtype="float32", max_slots=8, kv_bytes=1 << 24, max_resident_samplers=3,
        warm_up=False, status_seconds=0.2, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    address = str(folder / "e.sock")
    failed = []

    def run():
        try:
            run_engine(settings, address, KEY)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    yield address
    FrontEnd(address).shut_down()
    thread.join(60)
    assert not thread.is_alive() and not failed


@pytest.fixture
def client(engine):
    front_end = FrontEnd(engine)
    yield front_end
    front_end.do(*(RemoveModel(model_id) for model_id in ("A", "B", "C", "D", "E")))
    front_end.connection.close()


def logprobs(result):
    return np.concatenate([output["logprobs"] for output in result.outputs])


def test_what_is_served(client):
    info = client.info
    assert (info.model_name, info.family, info.vocab_size, info.max_context) == ("tiny", "llama", 257, 256)
    assert (info.max_row_tokens, info.max_adapters, info.max_rank, info.eos_ids) == (32, 4, 8, (256,))
    assert "cross_entropy" in info.losses and "stable_reinforce" in info.losses


def test_a_loop_of_reinforcement_learning(client):
    made = client.do(create("A", seed=3))
    assert made == ModelState(made.adapter, 32.0, 0) and made.adapter.seed == 3 and made.adapter.rank == 4
    before = client.do(fb("A", gradient=False))
    trained, stepped = client.do(fb("A"), optim("A"))
    np.testing.assert_array_equal(logprobs(before), logprobs(trained))
    assert trained.metrics["loss:sum"] == pytest.approx(-logprobs(trained).sum(), rel=1e-5)
    assert stepped.applied and stepped.policy_version == 1 and stepped.metrics["grad_norm"] > 0
    after = client.do(fb("A", gradient=False))
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]
    _, sampled = client.do(sampler("s", "A"), sample("s", num_samples=2, prompt_logprobs=True))
    assert [len(completion.tokens) for completion in sampled.completions] == [4, 4]
    assert all(completion.policy_version == 1 for completion in sampled.completions)
    assert np.isnan(sampled.prompt_logprobs[0]) and np.isfinite(sampled.prompt_logprobs[1:]).all()
    client.do(CloseSampler("s"))
    assert client.fails(sample("s")).category == "user"


def test_a_seed_that_was_not_given_is_chosen_and_told(client):
    seeds = [client.do(create(model_id, seed=None)).adapter.seed for model_id in "AB"]
    assert seeds[0] != seeds[1] and None not in seeds
    client.do(create("C", seed=seeds[0]))
    client.do(fb("A"), fb("C"))
    assert client.do(optim("A")).metrics["grad_norm"] == client.do(optim("C")).metrics["grad_norm"]


def test_pipelined_equals_sequential(client):
    client.do(create("A", seed=1), create("B", seed=1))
    steps = [(fb(None, 1), fb(None, 2), optim(None)), (fb(None, 3), optim(None, 3e-2)), (fb(None, 4), optim(None))]

    def of(model_id):
        return [_named(operation, model_id) for step in steps for operation in step]

    for operation in of("A"):
        client.do(operation)
    client.do(*of("B"))
    np.testing.assert_array_equal(*(logprobs(client.do(fb(model_id, gradient=False))) for model_id in "AB"))


def _named(operation, model_id):
    return type(operation)(**{**vars(operation), "model_id": model_id})


def test_models_are_independent_of_one_another_whatever_they_send(client):
    client.do(create("A", seed=1), create("B", rank=2, seed=2, mlp=False))
    alone = [client.do(fb("A", i), optim("A"))[0] for i in range(3)]
    client.do(RemoveModel("A"), RemoveModel("B"))
    client.do(create("A", seed=1), create("B", rank=2, seed=2, mlp=False))
    together = []
    for i in range(3):
        operations = (fb("A", i), fb("B", 9 + i, 5), optim("A"), optim("B", 1e6), fb("B", 99))
        together.append(client.do(*operations)[0])
        assert client.fails(_named(fb("B"), "nobody")).category == "user"
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(logprobs(one), logprobs(other))


def test_a_snapshot_stays_what_it_was(client):
    client.do(create("A"), fb("A", 0), optim("A", 0.1), sampler("old", "A"))
    ops = [client.submit(operation) for operation in (sample("old", 20), fb("A", 1), optim("A", 0.1))]
    first = client.wait(*ops)[0].result
    client.do(sampler("new", "A"))
    # One after the other: in fp32 the last bits depend on how many rows the head is multiplied with.
    again, new = client.do(sample("old", 20)), client.do(sample("new", 20))
    np.testing.assert_array_equal(first.completions[0].logprobs, again.completions[0].logprobs)
    assert first.completions[0].tokens == again.completions[0].tokens
    assert new.completions[0].policy_version == 2
    assert not np.array_equal(new.completions[0].logprobs, again.completions[0].logprobs)
    client.do(sampler("old", "A"))  # an inflight sampler
    replaced = client.do(sample("old", 20))
    np.testing.assert_array_equal(replaced.completions[0].logprobs, new.completions[0].logprobs)
    client.do(CloseSampler("old"), CloseSampler("new"))


def test_restored_with_the_optimizer_it_goes_on_as_if_never_interrupted(client, tmp_path):
    kept, steps = tmp_path / "weights" / "kept", [(fb("A", i), optim("A")) for i in range(4)]
    client.do(create("A", seed=5))
    client.do(*steps[0], *steps[1])
    assert client.do(SaveState("A", str(kept))).size_bytes > 1000
    client.do(*steps[2], *steps[3])
    uninterrupted = logprobs(client.do(fb("A", gradient=False)))
    outcomes = {}
    for optimizer in (True, False):
        client.do(RemoveModel("A"))
        restored = client.do(RestoreModel("A", str(kept), optimizer))
        assert (restored.adapter.rank, restored.adapter.seed, restored.alpha) == (4, 5, 32.0)
        assert restored.policy_version == (2 if optimizer else 0)
        client.do(*steps[2], *steps[3])
        outcomes[optimizer] = logprobs(client.do(fb("A", gradient=False)))
    np.testing.assert_array_equal(outcomes[True], uninterrupted)
    assert not np.array_equal(outcomes[False], uninterrupted)
    client.do(fb("A", 7), LoadWeights("A", str(kept), True))
    assert client.do(optim("A")).skipped_because == "no gradient was accumulated", "loading drops the gradient"
    client.do(*steps[2], *steps[3])
    np.testing.assert_array_equal(logprobs(client.do(fb("A", gradient=False))), uninterrupted)


def test_checkpoints_that_don_t_fit_are_refused(client, tmp_path):
    client.do(create("A"), create("B", rank=8), SaveState("A", str(tmp_path / "weights" / "a")))
    refusal = client.fails(LoadWeights("B", str(tmp_path / "weights" / "a"), False))
    assert refusal.category == "user" and "'weights/a' is of an adapter with another rank" in refusal.message
    refusal = client.fails(RestoreModel("C", str(tmp_path / "weights" / "none"), True))
    assert refusal.category == "user" and "There is no checkpoint 'weights/none'" in refusal.message
    assert client.fails(RestoreModel("A", str(tmp_path / "weights" / "a"), True)).message.startswith(
        "Model 'A' exists already"
    )
    assert client.fails(sampler("s", directory=tmp_path / "weights" / "a")).category == "user"
    refusal = client.fails(SaveState("A", str(tmp_path / "weights" / "a")))
    assert refusal.category == "server" and "exists already" in refusal.message


def test_an_adapter_goes_out_and_comes_back_in(client, tmp_path):
    directory = tmp_path / "sampler_weights" / "a"
    client.do(create("A", unembed=False), fb("A"), optim("A"), sampler("live", "A"), SaveAdapter("A", str(directory)))
    lora, _ = load_adapter(directory, ModelSpec.from_hf_config(CONFIG))
    assert (lora.rank, lora.alpha, lora.unembed) == (4, 32.0, False)
    client.do(sampler("disk", directory=directory), sampler("base"))
    # One after another: in fp32, products of other numbers of rows may sum in another order.
    live, disk, base = (client.do(sample(name, 9)) for name in ("live", "disk", "base"))
    np.testing.assert_array_equal(live.completions[0].logprobs, disk.completions[0].logprobs)
    assert not np.array_equal(live.completions[0].logprobs, base.completions[0].logprobs)
    assert "is a sampler checkpoint" in client.fails(RestoreModel("B", str(directory), True)).message
    restored = client.do(RestoreModel("B", str(directory), False))
    assert restored.adapter.seed is None and restored.policy_version == 0
    one, other = client.do(fb("A", gradient=False), fb("B", gradient=False))
    np.testing.assert_array_equal(logprobs(one), logprobs(other))
    client.do(*(CloseSampler(name) for name in ("live", "disk", "base")))


def test_slots_are_limited_and_freed(client):
    client.do(*(create(model_id) for model_id in "ABCD"))
    refusal = client.fails(create("E"))
    assert refusal.category == "user" and "max_adapters" in refusal.message
    assert client.fails(create("E", rank=9)).category == "user"
    client.do(RemoveModel("B"), create("E"))
    assert not client.do(optim("E")).applied, "nothing is left of B's"


def test_a_front_end_that_dies_is_followed_by_one_that_gets_its_answers(engine, client):
    client.do(create("A"), sampler("s", "A"))
    ops = [client.submit(operation) for operation in (fb("A"), optim("A"), sample("s", 30))]
    client.wait(*ops[:1], acknowledge=False)
    client.connection.close()
    second = FrontEnd(engine)
    assert "A" in second.info.open_models and "s" in second.info.open_samplers
    answers = second.wait(*ops)
    assert not [answer for answer in answers if isinstance(answer, Failed)]
    assert second.do(optim("A")).skipped_because == "no gradient was accumulated", "it ran once"
    second.do(CloseSampler("s"), RemoveModel("A"))
    second.connection.close()
    client.__init__(engine)  # for the fixture's clean-up


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_as_evaluations_ask_for_them(client, max_tokens):
    """As lm-evaluation-harness does: echo, logprobs=1, prompts of token ids; read off as its parse_logprobs does."""
    tokenizer = tiny_tokenizer()
    prompts = [[int(datum.tokens[0]), *datum.inputs["target_tokens"].tolist()] for datum in data(5)]
    # What the model finds likeliest next, so that one continuation is the greedy one.
    client.do(sampler("s"))
    greedy = Sample("s", tuple(prompts[0][:6]), SamplingParams(max_tokens=7, temperature=0.0, stop=()))
    prompts[0] = [*prompts[0][:6], *client.do(greedy).completions[0].tokens]
    asked = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1,
             "seed": 1234, "echo": True}  # fmt: skip
    plan = plan_completion(CompletionRequest.model_validate(asked), tokenizer)
    results = [client.do(dataclasses.replace(one, sampler_id="s")) for one in plan.samples]
    choices = openai.response(plan, results, tokenizer, "cmpl-1", 0)["choices"]
    # The trainer's own log-probs of the same tokens; a fresh adapter is the base model.
    client.do(create("A"))
    wholes = [np.array(prompt) for prompt in prompts]
    datums = tuple(Datum(one[:-1], {"target_tokens": one[1:]}) for one in wholes)
    scored = client.do(ForwardBackward("A", datums, "cross_entropy", {}, False)).outputs
    for i, (choice, context) in enumerate(zip(choices, (6, 3, 1), strict=True)):
        found = choice["logprobs"]
        end = None if max_tokens == 0 else -1
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompts[i]) + max_tokens
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        logprobs, tops = found["token_logprobs"][context:end], found["top_logprobs"][context:end]
        assert sum(logprobs) == pytest.approx(scored[i]["logprobs"][context - 1 :].sum(), abs=1e-4)
        is_greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        assert is_greedy == (i == 0)
    client.do(CloseSampler("s"))


def test_tokens_are_streamed(client):
    client.do(sampler("s"))
    client.news.clear()
    op = client.submit(sample("s", 20, num_samples=2, stream=True))
    sampled = client.wait(op)[0].result
    told = [news for news in client.news if isinstance(news, Tokens)]
    assert {news.operation_id for news in told} == {op} and len(told) > 2
    for completion in sampled.completions:
        mine = [news for news in told if news.sample_index == completion.sample_index]
        assert tuple(token for news in mine for token in news.tokens) == completion.tokens
        assert [news.finished for news in mine] == [False] * (len(mine) - 1) + [True]
    client.do(CloseSampler("s"))


def num_compilations(client):
    """As of a status that was made from now on."""
    client.news.clear()
    while sum(isinstance(news, EngineStatus) for news in client.news) < 2:
        client._receive()
    return client.news[-1].totals["compilations"]


@pytest.fixture
def no_persistent_cache(monkeypatch):
    """Programs that an earlier run of the tests compiled, or kept whole, don't count as compilations."""
    monkeypatch.setattr(Executables, "_path", lambda *args: None)
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def test_the_trainers_programs_are_counted_when_they_are_compiled(client, no_persistent_cache):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 9)
    wide = rng.integers(0, 256, (9, 3))  # three targets a position: a program that nothing else here needs
    datum = Datum(tokens, {"target_tokens": wide, "weights": np.ones((9, 3), np.float32)})
    operation = ForwardBackward("A", (datum,), "cross_entropy")
    client.do(create("A"), fb("A"))
    before = num_compilations(client)
    client.do(operation)
    after = num_compilations(client)
    client.do(operation, operation, fb("A"))
    assert before > 0 and after > before and num_compilations(client) == after


def test_status_tells_of_the_work(client):
    client.do(create("A"), fb("A"), optim("A"))
    client.news.clear()
    while not client.news:
        client._receive()
    status = client.news[-1]
    assert isinstance(status, EngineStatus)
    assert status.gauges["num_models"] == 1 and status.totals["trained_tokens"] > 0
    assert status.seconds["train"] > 0 and status.seconds["idle"] >= 0 and status.seconds["load"] > 0
