"""What the engine's facts say about a request, by the text of the errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tinker import types as sdk
from wire_bodies import INFO, as_proto, dense_tensor, json_bytes, model_input, policy_datum, sample_body, train_request

from locojax.server import wire


def checked(*data: sdk.Datum, loss: str = "importance_sampling", config=None) -> wire.TrainBody:
    body = wire.decode_train(as_proto(train_request(data, loss, config)))
    assert wire.validate_train(body, INFO) is body
    return body


def refused(*data: sdk.Datum, loss: str = "importance_sampling", config=None) -> str:
    with pytest.raises(wire.WireError) as caught:
        checked(*data, loss=loss, config=config)
    assert caught.value.status == 400
    return str(caught.value)


def floats(*values: float) -> sdk.TensorData:
    return dense_tensor(np.array(values, np.float32))


def ints(*values) -> sdk.TensorData:
    return dense_tensor(np.array(values, np.int64))


def test_good_data_pass():
    checked(policy_datum(1), policy_datum(32), loss="ppo", config={"clip_low_threshold": 0.9})
    two_targets = sdk.Datum(
        model_input=model_input([1, 2]),
        loss_fn_inputs={"target_tokens": ints([1, 2], [3, 4]), "weights": dense_tensor(np.ones((2, 2), np.float32))},
    )
    checked(two_targets, loss="cross_entropy")
    # No loss reads an input of a name that none has: its values and its length are the client's own affair.
    checked(policy_datum(mask=floats(np.nan)))


def test_losses():
    assert refused(policy_datum(), loss="pp0") == (
        "Unknown loss 'pp0'. Expected: one of cross_entropy, importance_sampling, ppo, stable_reinforce. "
        "The nearest is 'ppo'."
    )
    assert "The nearest" not in refused(policy_datum(), loss="zzz")
    assert "Use forward_backward_custom with a Python function" in refused(policy_datum(), loss="custom")
    body = wire.decode_train(as_proto(train_request([policy_datum()], "dro")))
    assert wire.validate_train(body, dataclasses.replace(INFO, losses=())) is body


def test_shapes():
    assert "There is nothing to train on. Got: no data." in refused()
    empty = sdk.Datum(model_input=model_input([]), loss_fn_inputs={"target_tokens": ints()})
    assert "data[1].model_input is empty" in refused(policy_datum(), empty)
    assert "data[1].model_input is too long. Got: 33 tokens. Expected: at most 32." in refused(
        policy_datum(), policy_datum(33)
    )
    lacking = sdk.Datum(model_input=model_input([1]), loss_fn_inputs={"weights": floats(1)})
    assert "data[0].loss_fn_inputs lacks 'target_tokens'. Got: ['weights']." in refused(lacking)
    assert "does not match its model_input of 4 tokens. Got: shape [3]. Expected: shape [4]." in refused(
        policy_datum(target_tokens=ints(1, 2, 3))
    )
    assert "Got: shape [4, 1]. Expected: shape [4]." in refused(policy_datum(target_tokens=ints([1], [2], [3], [4])))
    assert "Expected: shape [4] or [4, K]." in refused(policy_datum(target_tokens=ints(1)), loss="cross_entropy")
    assert "Got: shape [4, 0]" in refused(
        policy_datum(target_tokens=dense_tensor(np.zeros((4, 0), np.int64))), loss="cross_entropy"
    )
    assert "'target_tokens'] does not hold integers. Got: float32." in refused(
        policy_datum(target_tokens=floats(1, 2, 3, 4))
    )
    assert (
        "data[0].loss_fn_inputs['advantages'] does not match target_tokens. Got: shape [3]. Expected: shape [4]."
        in (refused(policy_datum(advantages=floats(1, 2, 3))))
    )


@pytest.mark.parametrize("wrong", [-1, 1000, 2**40])
def test_ids_outside_the_vocabulary(wrong):
    assert refused(policy_datum(), policy_datum(target_tokens=ints(1, 2, wrong, 3))) == (
        "data[1].loss_fn_inputs['target_tokens'] holds a token id outside the vocabulary. "
        f"Got: {wrong} at position 2. Expected: 0 to 999."
    )
    if wrong < 2**31:
        datum = policy_datum()
        odd = sdk.Datum(model_input=model_input([1, 2, 3, wrong]), loss_fn_inputs=datum.loss_fn_inputs)
        assert "data[1].model_input holds a token id outside the vocabulary. Got: " in refused(datum, odd)


@pytest.mark.parametrize("name", ["advantages", "logprobs", "weights"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(name, value):
    assert refused(policy_datum(), policy_datum(**{name: floats(1, value, 3, 4)})) == (
        f"data[1].loss_fn_inputs['{name}'] holds a value that is not finite. Got: {value} at position 1."
    )


def test_settings_that_are_not_finite():
    assert "loss_fn_config['beta'] is not a finite number. Got: nan." in refused(
        policy_datum(), config={"beta": float("nan")}
    )


def test_stable_reinforce_needs_provenance_for_every_datum():
    spans = [sdk.SampledProvenanceSpan(sequence_id="q", length=4)]
    datum = policy_datum().with_provenance(model_input=spans, loss_fn_inputs=spans)
    checked(datum, loss="stable_reinforce")
    assert "data[1] lacks provenance spans, which stable_reinforce needs. Use Datum.with_provenance" in refused(
        datum, policy_datum(), loss="stable_reinforce"
    )


def sampled(**replaced) -> wire.SampleBody:
    return wire.validate_sample(wire.decode_sample(json_bytes(sample_body(**replaced))), INFO)


def prompt(*tokens: int) -> dict:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def test_max_tokens_is_cut_to_the_room_that_is_left():
    assert sampled().sample.params.max_tokens == 4
    assert sampled(sampling_params={"max_tokens": 10**6}).sample.params.max_tokens == 61
    assert sampled(sampling_params={}).sample.params.max_tokens is None
    assert sampled(prompt=prompt(*range(63))).sample.params.max_tokens == 1


@pytest.mark.parametrize(
    ("replaced", "text"),
    [
        (
            {"prompt": prompt(*range(64))},
            "The prompt is too long: no token can follow it. Got: 64 tokens. Expected: at most 63.",
        ),
        (
            {"prompt": prompt(1, 1000)},
            "prompt holds a token id outside the vocabulary. Got: 1000 at position 1. Expected: 0 to 999.",
        ),
        ({"prompt": prompt(-1)}, "prompt holds a token id outside the vocabulary. Got: -1 at position 0."),
        ({"sampling_params": {"stop": [2, 1000]}}, "sampling_params.stop holds a token id outside the vocabulary."),
        ({"sampling_params": {"stop": [2**63]}}, "sampling_params.stop holds a token id outside the vocabulary."),
        (
            {"target_prompt_logprobs": {"data": [-1, -2], "dtype": "int64", "shape": [2, 1]}},
            "target_prompt_logprobs holds a token id outside the vocabulary. Got: -2 at position 1. Expected: -1 to",
        ),
        ({"topk_prompt_logprobs": 1001}, "More likeliest tokens are asked for than there are. Got: 1001."),
    ],
)
def test_samples_that_do_not_fit(replaced, text):
    with pytest.raises(wire.WireError) as caught:
        sampled(**replaced)
    assert text in str(caught.value)
    assert caught.value.status == 400
