"""Many models over one base: nothing that one client sends moves another's weights by one bit."""

from __future__ import annotations

import math

import numpy as np
import tinker
from conformance.client import (
    TEXTS,
    Client,
    close_to,
    datum,
    equal,
    fingerprint,
    forward,
    grad_norm,
    metric,
    refused,
    rl_datum,
    sample,
    scored,
    session_of,
    snapshot,
    train,
    version_of,
)
from tinker import types

N = len(TEXTS[0]) - 1


def probe_weight_decay_stays_with_its_model(client: Client) -> None:
    one, other = client.trainer(seed=1), client.trainer(seed=2)
    train(one)
    train(other)
    before = fingerprint(other)
    first = one.forward_backward([datum(TEXTS[0])], "cross_entropy")
    one.optim_step(types.AdamParams(learning_rate=0.1, weight_decay=0.5)).result()
    first.result()
    equal(fingerprint(other), before)


def probe_poison_stays_with_its_model(client: Client) -> None:
    """Infinite and NaN weights, a learning rate of a million, beta2 = 0.999 ...: the neighbour keeps every bit."""
    one, other = client.trainer(seed=1), client.trainer(seed=2)
    train(other)
    before = fingerprint(other)
    # SDKs that write JSON can't send what JSON doesn't have: they fail by themselves, and leave a gap in the sequence.
    is_binary = version_of(tinker.__version__) >= (0, 25)
    for weight in (1e38, math.inf, math.nan) if is_binary else (1e38,):
        try:
            one.forward_backward([datum(TEXTS[0], [weight] * N)], "cross_entropy").result()
        except tinker.TinkerError:
            pass  # refused by name is as good as accepted and contained
        for adam in (
            types.AdamParams(learning_rate=1e6, beta2=0.999),
            types.AdamParams(learning_rate=1e6, weight_decay=0.1, eps=0.0),
        ):
            try:
                one.optim_step(adam).result()
            except tinker.TinkerError:
                pass
        equal(fingerprint(other), before)
    sampled = sample(client.base_sampler(), TEXTS[0]).result().sequences[0]
    assert np.isfinite(sampled.logprobs).all()


def probe_adam_has_exact_hyper_parameters(client: Client) -> None:
    """beta2 = 0.999 is not 1, and a learning rate is what was sent. Adam's first step is lr g / (|g| + eps)."""
    trainer = client.trainer()
    losses = []
    for _ in range(6):
        future = trainer.forward_backward([datum(TEXTS[0])], "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=5e-3, beta1=0.9, beta2=0.999, eps=1e-8)).result()
        losses.append(future.result().metrics["loss:sum"])
    assert np.isfinite(losses).all() and losses[-1] < losses[0], losses
    if any(key.split(":")[0] in ("learning_rate", "lr") for key in step.metrics or {}):
        name = "learning_rate" if "learning_rate" in str(step.metrics) else "lr"
        assert np.float32(metric(step, name)) == np.float32(5e-3)


def probe_a_new_model_has_no_old_gradients(client: Client) -> None:
    """Gradients that a model left behind are not the next one's, whichever slot it gets."""
    old = client.trainer(seed=1)
    old.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
    client.finish(session_of(old))
    for _ in range(2):
        new = client.trainer(seed=1)
        before = fingerprint(new)
        step = new.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert metric(step, "grad_norm") == 0.0
        equal(fingerprint(new), before)


def probe_a_fresh_adapter_is_the_base(client: Client) -> None:
    """C31: B is 0 at the start, so log-probs are the base model's."""
    tokens = TEXTS[0]
    base = np.array(scored(client.base_sampler(), tokens)[1:], np.float64)
    close_to(forward(client.trainer(), [datum(tokens)])[0], base, 1e-4)


def probe_many_ranks_and_losses_at_once(client: Client) -> None:
    """Models of different ranks, losses and learning rates, all in the queue together, each as if alone."""
    settings = [(1, 0.01), (4, 0.02), (8, 0.005), (16, 0.01)]

    def run(together: bool) -> list[np.ndarray]:
        service = client.service()
        trainers = [client.trainer(service, rank=rank, seed=i) for i, (rank, _) in enumerate(settings)]
        prints = []
        for i, (trainer, (_, rate)) in enumerate(zip(trainers, settings, strict=True)):
            train(trainer, TEXTS[i : i + 1], steps=2, rate=rate) if not together else None
        if together:
            pending = []
            for _ in range(2):
                for i, (trainer, (_, rate)) in enumerate(zip(trainers, settings, strict=True)):
                    pending.append(trainer.forward_backward([datum(TEXTS[i])], "cross_entropy"))
                    pending.append(trainer.optim_step(types.AdamParams(learning_rate=rate)))
            for future in pending:
                future.result()  # type: ignore[attr-defined]
        prints = [fingerprint(trainer) for trainer in trainers]
        client.finish(session_of(trainers[0]))
        return prints

    for alone, mixed in zip(run(False), run(True), strict=True):
        close_to(mixed, alone, 1e-3)


def probe_seeds_of_adapters(client: Client) -> None:
    """The same seed gives the same adapter, another seed another one."""
    prints = []
    for seed in (3, 3, 4):
        trainer = client.trainer(seed=seed)
        train(trainer)
        prints.append(fingerprint(trainer))
        client.finish(session_of(trainer))
    equal(prints[1], prints[0])
    assert not np.array_equal(prints[2], prints[0])


def probe_which_modules_are_trained(client: Client) -> None:
    """train_mlp, train_attn and train_unembed are honoured: each choice has a gradient of its own."""
    norms = {}
    for name in ("mlp", "attn", "unembed", "all"):
        flags = {f"train_{part}": name in (part, "all") for part in ("mlp", "attn", "unembed")}
        trainer = client.trainer(seed=0, **flags)
        norms[name] = grad_norm(trainer, [datum(TEXTS[0])])
        client.finish(session_of(trainer))
    assert len({round(norm, 5) for norm in norms.values()}) == 4, norms
    assert all(norm > 0 for norm in norms.values()), norms


def probe_rank_matters_and_has_a_limit(client: Client) -> None:
    """A rank above the server's most is refused with the most; it is never silently cut."""
    with refused("rank"):
        client.trainer(rank=100_000)


def probe_unknown_base_model(client: Client) -> None:
    """Refused by name, with what is served."""
    with refused("no/such-model", client.base_model):
        client.note(client.service().create_lora_training_client(base_model="no/such-model", rank=4))
    with refused("no/such-model"):
        sample(client.service().create_sampling_client(base_model="no/such-model"), [1]).result()


def probe_finished_sessions_free_their_slots(client: Client) -> None:
    """More models in a row than there are slots."""
    for i in range(12):
        trainer = client.trainer(seed=i)
        client.finish(session_of(trainer))


def probe_full_server_says_who_holds_it(client: Client) -> None:
    """When every slot is taken the next model is refused in words, at once, and comes when one is freed."""
    service = client.service()
    held = []
    try:
        for i in range(64):
            held.append(client.trainer(service, seed=i))
    except (tinker.TinkerError, ValueError) as error:
        text = str(error)
    else:
        raise AssertionError("64 models fit: the server has no limit?")
    assert len(held) >= 4, f"only {len(held)} models fit: {text}"
    assert any(word in text.lower() for word in ("slot", "adapter")), text
    client.finish(session_of(held[0]))
    client.trainer()


def probe_a_finished_model_is_gone(client: Client) -> None:
    trainer = client.trainer()
    client.finish(session_of(trainer))
    with refused():
        forward(trainer, [datum(TEXTS[0])])


def probe_out_of_vocabulary(client: Client) -> None:
    """Refused at once with the field and the limit; the same model and the others go on."""
    trainer = client.trainer()
    before = fingerprint(trainer)
    for bad in (datum([65, 66, 5000]), datum([65, 5000, 66]), datum([65, -1, 66])):
        with refused("vocab"):
            trainer.forward_backward([datum(TEXTS[0]), bad], "cross_entropy").result()
        trainer = client.trainer()
        equal(fingerprint(trainer), before)
    sampler = client.base_sampler()
    with refused("vocab"):
        sample(sampler, [65, 5000]).result()
    assert len(sample(sampler, [65, 66]).result().sequences) == 1


def probe_empty_prompt_and_empty_datum(client: Client) -> None:
    with refused("empty"):
        sample(client.base_sampler(), []).result()
    with refused():
        client.trainer().forward_backward([datum([65])], "cross_entropy").result()


def probe_lengths_must_agree(client: Client) -> None:
    """A datum whose inputs have other lengths than its tokens is refused, naming the field."""
    trainer = client.trainer()
    with refused("weights"):
        trainer.forward_backward([datum(TEXTS[0], [1.0] * (N - 3))], "cross_entropy").result()
    trainer = client.trainer()
    with refused("advantages"):
        trainer.forward_backward([datum(TEXTS[0], logprobs=[0.0] * N)], "importance_sampling").result()
    trainer = client.trainer()
    with refused():
        trainer.forward_backward([datum([65] * 5000)], "cross_entropy").result()


def probe_a_failed_request_leaves_the_model_usable(client: Client) -> None:
    """After a refused forward_backward the next requests of the same client still work."""
    trainer = client.trainer()
    with refused():
        trainer.forward_backward([datum([65, 5000])], "cross_entropy").result()
    assert grad_norm(trainer, [datum(TEXTS[0])]) > 0


def probe_trainer_and_sampler_agree(client: Client) -> None:
    """The same model code on both sides: log-probs of the same tokens within 1e-4, after training too."""
    trainer = client.trainer()
    train(trainer, steps=3)
    sampler = snapshot(trainer)
    drawn = sample(sampler, TEXTS[0], max_tokens=24, seed=5).result().sequences[0]
    tokens = [*TEXTS[0], *drawn.tokens]
    trained = forward(trainer, [datum(tokens)])[0]
    close_to(trained[len(TEXTS[0]) - 1 :], drawn.logprobs, 1e-3)
    close_to(np.array(scored(sampler, tokens)[1:], np.float64), trained, 1e-3)


def probe_on_policy_ratio_is_one(client: Client) -> None:
    trainer = client.trainer()
    train(trainer)
    drawn = sample(snapshot(trainer), TEXTS[0], max_tokens=8).result().sequences[0]
    n, length = len(TEXTS[0]) - 1, len(drawn.tokens)
    case = rl_datum([*TEXTS[0], *drawn.tokens], [0.0] * n + list(drawn.logprobs), [0.0] * n + [1.0] * length)
    result = trainer.forward_backward([case], "importance_sampling").result()
    close_to(result.metrics["loss:sum"], -float(length), 1e-3)
