"""Losses: sums over tokens, linear in weights, each against a numpy oracle; log-probs in full fp32."""

from __future__ import annotations

import numpy as np
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
    since,
    snapshot,
    tensor,
    train,
    values,
    with_torch,
)
from tinker import types

TEXT = TEXTS[0]
N = len(TEXT) - 1


def probe_loss_is_a_token_sum(client: Client) -> None:
    """Twice the weight, the datum twice, and two calls all give twice the gradient (C19)."""
    trainer = client.trainer()
    one = grad_norm(trainer, [datum(TEXT)])
    assert one > 0
    close_to(grad_norm(trainer, [datum(TEXT, [2.0] * N)]) / one, 2.0, 1e-3)
    close_to(grad_norm(trainer, [datum(TEXT), datum(TEXT)]) / one, 2.0, 1e-3)
    first = trainer.forward_backward([datum(TEXT)], "cross_entropy")
    close_to(grad_norm(trainer, [datum(TEXT)]) / one, 2.0, 1e-3)
    first.result()


def probe_negative_and_fractional_weights(client: Client) -> None:
    """Linear in the weights: signs cancel, and weights that sum to zero are nothing special."""
    trainer = client.trainer()
    weights = np.linspace(-1.0, 1.0, N)
    lp = forward(trainer, [datum(TEXT)])[0]
    result = trainer.forward_backward([datum(TEXT, weights.tolist())], "cross_entropy").result()
    close_to(result.metrics["loss:sum"], -np.sum(weights * lp), 1e-3)
    other = grad_norm(trainer, [datum(TEXT, (-weights).tolist())])
    assert other < 1e-4, f"w and -w should cancel, grad_norm {other}"
    assert 0 < grad_norm(trainer, [datum(TEXT, weights.tolist())]) < 1e4


def probe_loss_sum_metric(client: Client) -> None:
    """`loss:sum` is there, and is -sum w lp; metric names have exactly one colon."""
    trainer = client.trainer()
    weights = [0.5, 0.0, 2.0] + [1.0] * (N - 3)
    result = trainer.forward_backward([datum(TEXT, weights)], "cross_entropy").result()
    close_to(result.metrics["loss:sum"], -np.sum(np.array(weights) * values(result.loss_fn_outputs[0])), 1e-4)
    assert all(name.count(":") == 1 for name in result.metrics), result.metrics


def probe_all_zero_weights_are_a_no_op(client: Client) -> None:
    """C15: loss 0, no gradient; beside another call it changes nothing."""
    trainer = client.trainer()
    nothing = datum(TEXT, [0.0] * N)
    result = trainer.forward_backward([nothing], "cross_entropy").result()
    assert result.metrics["loss:sum"] == 0.0
    assert grad_norm(trainer, [nothing]) == 0.0
    alone = grad_norm(trainer, [datum(TEXT)])
    first = trainer.forward_backward([nothing], "cross_entropy")
    close_to(grad_norm(trainer, [datum(TEXT)]), alone, 1e-5)
    first.result()


def probe_shortest_datum(client: Client) -> None:
    """C17: one input token, one target, one log-prob."""
    trainer = client.trainer()
    result = trainer.forward_backward([datum([65, 66])], "cross_entropy").result()
    assert values(result.loss_fn_outputs[0]).shape == (1,)
    assert grad_norm(trainer, [datum([65, 66])]) > 0


def probe_forward_equals_forward_backward(client: Client) -> None:
    """The same path: the same log-probs to the bit, and forward alone leaves no gradient."""
    trainer = client.trainer()
    train(trainer)
    data = [datum(text) for text in TEXTS]
    ahead = forward(trainer, data)
    both = trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    for before, output in zip(ahead, both.loss_fn_outputs, strict=True):
        equal(values(output), before)
    forward(trainer, data)
    assert metric(trainer.optim_step(types.AdamParams(learning_rate=0.1)).result(), "grad_norm") == 0.0
    equal(fingerprint(trainer), np.concatenate(ahead))


def probe_logprobs_are_fp32(client: Client) -> None:
    """Not rounded to bf16, neither the trainer's nor the sampler's."""
    trainer = client.trainer()
    lp = np.concatenate(forward(trainer, [datum(text) for text in TEXTS])).astype(np.float32)
    drawn = np.array(sample(snapshot(trainer), TEXT, max_tokens=32).result().sequences[0].logprobs, np.float32)
    for logprobs in (lp, drawn):
        is_bf16 = (logprobs.view(np.uint32) & 0xFFFF) == 0
        assert is_bf16.mean() < 0.2, f"{is_bf16.mean():.0%} of the log-probs are bf16 values"


def policy_case(trainer: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """lp of the model, and made-up q and A: ratios on both sides of every bound, and zeros where nothing is trained."""
    rng = np.random.default_rng(0)
    lp = forward(trainer, [datum(TEXT)])[0]  # type: ignore[arg-type]
    advantages = rng.choice([-1.5, 0.7, 1.0], N)
    q = lp - rng.uniform(-0.6, 0.6, N)
    advantages[:4], q[:4] = 0.0, 0.0
    return lp, q, advantages


def check_policy_loss(client: Client, loss: str, want: object, config: dict[str, float] | None = None) -> None:
    trainer = client.trainer()
    train(trainer)
    lp, q, A = policy_case(trainer)
    expected = want(lp, q, A)  # type: ignore[operator]
    expected[A == 0] = 0.0
    result = trainer.forward_backward([rl_datum(TEXT, q, A)], loss, config).result()  # type: ignore[arg-type]
    close_to(result.metrics["loss:sum"], expected.sum(), 1e-3)
    close_to(values(result.loss_fn_outputs[0]), lp, 1e-4)
    if "elementwise_loss" in result.loss_fn_outputs[0]:
        close_to(values(result.loss_fn_outputs[0], "elementwise_loss"), expected, 1e-3)
    assert metric(trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(), "grad_norm") > 0


def probe_importance_sampling(client: Client) -> None:
    check_policy_loss(client, "importance_sampling", lambda lp, q, A: -np.exp(lp - q) * A)


def probe_ppo(client: Client) -> None:
    def ppo(lp: np.ndarray, q: np.ndarray, A: np.ndarray) -> np.ndarray:
        r = np.exp(lp - q)
        return -np.minimum(r * A, np.clip(r, 0.8, 1.2) * A)

    check_policy_loss(client, "ppo", ppo)


def probe_ppo_with_its_own_bounds(client: Client) -> None:
    def ppo(lp: np.ndarray, q: np.ndarray, A: np.ndarray) -> np.ndarray:
        r = np.exp(lp - q)
        return -np.minimum(r * A, np.clip(r, 0.9, 1.05) * A)

    check_policy_loss(client, "ppo", ppo, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05})


def probe_cispo(client: Client) -> None:
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    check_policy_loss(client, "cispo", lambda lp, q, A: -np.clip(np.exp(lp - q), 0.9, 1.1) * lp * A, bounds)


def probe_dro(client: Client) -> None:
    check_policy_loss(client, "dro", lambda lp, q, A: -(lp * A - 0.5 * 0.1 * (lp - q) ** 2), {"beta": 0.1})


@since("0.36")
def probe_gspo(client: Client) -> None:
    trainer = client.trainer()
    train(trainer)
    lp, q, A = policy_case(trainer)
    mask = (A != 0).astype(np.float32)
    s = np.exp(np.mean((lp - q)[mask != 0]))
    expected = -np.minimum(s * A, np.clip(s, 0.8, 1.2) * A)
    case = datum(TEXT, logprobs=q, advantages=A, sequence_ratio_mask=mask)
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    result = trainer.forward_backward([case], "gspo", bounds).result()
    close_to(result.metrics["loss:sum"], expected.sum(), 1e-3)


def probe_positions_without_advantage_are_nan_safe(client: Client) -> None:
    """Where A is 0 the sampler's log-prob may be anything."""
    trainer = client.trainer()
    lp = forward(trainer, [datum(TEXT)])[0]
    A = np.array([0.0] * 5 + [1.0] * (N - 5))
    q = np.where(A == 0, -1e30, lp)
    result = trainer.forward_backward([rl_datum(TEXT, q, A)], "importance_sampling").result()
    close_to(result.metrics["loss:sum"], -A.sum(), 1e-3)
    norm = metric(trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(), "grad_norm")
    close_to(grad_norm(trainer, [rl_datum(TEXT, np.where(A == 0, 0.0, lp), A)], "importance_sampling"), norm, 1e-4)


def probe_many_targets_a_position(client: Client) -> None:
    """cross_entropy with [N, K] targets and weights: log-probs [N, K], loss -sum w lp."""
    trainer = client.trainer()
    pairs = np.stack([np.array(TEXT[1:]), (np.array(TEXT[1:]) + 1) % 256], axis=1)
    weights = np.tile([0.75, 0.25], (N, 1))
    case = types.Datum(
        model_input=types.ModelInput.from_ints(list(TEXT[:-1])),
        loss_fn_inputs={"target_tokens": tensor(pairs, "int64"), "weights": tensor(weights, "float32")},
    )
    result = trainer.forward_backward([case], "cross_entropy").result()
    lp = values(result.loss_fn_outputs[0]).reshape(N, 2)
    close_to(lp[:, 0], forward(trainer, [datum(TEXT)])[0], 1e-4)
    close_to(result.metrics["loss:sum"], -(weights * lp).sum(), 1e-4)


def probe_weights_left_out_are_ones(client: Client) -> None:
    trainer = client.trainer()
    case = types.Datum(
        model_input=types.ModelInput.from_ints(list(TEXT[:-1])),
        loss_fn_inputs={"target_tokens": tensor(TEXT[1:], "int64")},
    )
    result = trainer.forward_backward([case], "cross_entropy").result()
    close_to(result.metrics["loss:sum"], -values(result.loss_fn_outputs[0]).sum(), 1e-4)


def probe_mixed_losses_in_one_queue(client: Client) -> None:
    """Nothing defaults to another loss, also when requests stand in the queue together."""
    trainer = client.trainer()
    train(trainer)
    lp, q, A = policy_case(trainer)
    futures = [
        trainer.forward_backward([datum(TEXT)], "cross_entropy"),
        trainer.forward_backward([rl_datum(TEXT, q, A)], "importance_sampling"),
        trainer.forward_backward([rl_datum(TEXT, q, A)], "ppo"),
    ]
    r = np.exp(lp - q)
    want = [-lp.sum(), -(r * A).sum(), -np.minimum(r * A, np.clip(r, 0.8, 1.2) * A).sum()]
    for future, expected in zip(futures, want, strict=True):
        close_to(future.result().metrics["loss:sum"], expected, 1e-3)


def probe_text_in_several_chunks(client: Client) -> None:
    """An input of several chunks is their concatenation."""
    trainer = client.trainer()
    whole = datum(TEXT)
    cut = types.Datum(
        model_input=types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=list(TEXT[:5])),
                types.EncodedTextChunk(tokens=list(TEXT[5:6])),
                types.EncodedTextChunk(tokens=list(TEXT[6:-1])),
            ]
        ),
        loss_fn_inputs=whole.loss_fn_inputs,
    )
    one, other = forward(trainer, [whole, cut])
    equal(other, one)


def probe_many_data_keep_their_order(client: Client) -> None:
    """A batch that the SDK cuts into chunks and sends in any order: outputs in datum order, gradients exact."""
    trainer = client.trainer()
    data = [datum([i % 256, (7 * i) % 256, (3 * i + 1) % 256]) for i in range(1200)]
    result = trainer.forward_backward(data, "cross_entropy").result(timeout=100)
    assert len(result.loss_fn_outputs) == len(data)
    total = sum(values(output).sum() for output in result.loss_fn_outputs)
    close_to(result.metrics["loss:sum"], -total, 1e-3)
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    picked = [3, 600, 1030, 1199]
    for i, lp in zip(picked, forward(trainer, [data[i] for i in picked]), strict=True):
        close_to(values(result.loss_fn_outputs[i]), lp, 1e-4)


@with_torch
def probe_forward_backward_custom(client: Client) -> None:
    """A loss of the client's own has the gradient of the same built-in loss."""
    import torch

    trainer = client.trainer()
    expected = grad_norm(trainer, [datum(TEXT, [0.5] * N)])

    def half_cross_entropy(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
        loss = -0.5 * torch.stack([lp.sum() for lp in logprobs]).sum()
        return loss, {"mine": 1.0}

    result = trainer.forward_backward_custom([datum(TEXT)], half_cross_entropy).result()
    assert result.metrics["mine"] == 1.0
    norm = metric(trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(), "grad_norm")
    close_to(norm, expected, 1e-3)


@since("0.36")
def probe_stable_reinforce(client: Client) -> None:
    """Data that name what the server sampled need no log-probs of the client's; on the policy itself each r is 1."""
    trainer = client.trainer()
    train(trainer)
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True)
    prompt = TEXT[:6]
    drawn = sample(sampler, prompt, num_samples=2, max_tokens=6).result().sequences
    data = []
    for sequence, advantage in zip(drawn, (1.0, -0.5), strict=True):
        tokens = [*prompt, *sequence.tokens]
        A = [0.0] * (len(prompt) - 1) + [advantage] * len(sequence.tokens)
        q = [0.0] * (len(prompt) - 1) + list(sequence.logprobs)
        spans = types.PromptProvenanceSpan, types.SampledProvenanceSpan
        name, n = sequence.sequence_id, len(sequence.tokens)
        data.append(
            rl_datum(tokens, q, A).with_provenance(
                [spans[0](sequence_id=name, length=len(prompt)), spans[1](sequence_id=name, length=n - 1)],
                [spans[0](sequence_id=name, offset=1, length=len(prompt) - 1), spans[1](sequence_id=name, length=n)],
            )
        )
    result = trainer.forward_backward(data, "stable_reinforce", {"kl_coeff": 0.01}).result()
    assert np.isfinite(result.metrics["loss:sum"])
    for output, sequence in zip(result.loss_fn_outputs, drawn, strict=True):
        close_to(values(output)[len(prompt) - 1 :], sequence.logprobs, 1e-3)
    assert metric(trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(), "grad_norm") > 0


@since("0.36")
def probe_stable_reinforce_needs_provenance(client: Client) -> None:
    """Without spans there is nothing recorded to compare with: a clear refusal, not another loss."""
    trainer = client.trainer()
    with refused("provenance"):
        trainer.forward_backward([rl_datum(TEXT, [0.0] * N, [1.0] * N)], "stable_reinforce").result()


def probe_unknown_loss(client: Client) -> None:
    """C: an unknown loss is refused by name with what exists, at once."""
    model_id = client.raw_model()
    fields = {"data": [], "loss_fn": "pp0"}
    tokens = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    inputs = {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}}
    fields["data"] = [{"model_input": tokens, "loss_fn_inputs": inputs}]  # type: ignore[list-item]
    answer = client.post("forward_backward", model_id=model_id, seq_id=1, forward_backward_input=fields)
    if answer.status_code == 200:
        failure = client.result(answer)
        text, category = failure["error"], failure["category"]
        assert category == "user", failure
    else:
        assert answer.status_code in (400, 422), answer.text
        text = answer.text
    assert "pp0" in text and "ppo" in text, text
