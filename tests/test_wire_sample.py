"""asample bodies: what is read, what the API leaves out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tinker.types.sample_request import SampleRequest
from wire_bodies import csr_tensor, json_bytes, sample_body

from locojax.hosts.protocol import Sample
from locojax.server import wire
from locojax.types import SamplingParams


def decoded(**replaced) -> wire.SampleBody:
    return wire.decode_sample(json_bytes(sample_body(**replaced)))


def refused(status: int = 400, **replaced) -> str:
    with pytest.raises(wire.WireError) as caught:
        decoded(**replaced)
    assert caught.value.status == status, str(caught.value)
    return str(caught.value)


def params(**replaced) -> dict:
    return sample_body()["sampling_params"] | replaced


def tokens(*chunks) -> dict:
    return {"chunks": [{"type": "encoded_text", "tokens": list(chunk)} for chunk in chunks]}


def test_what_the_sdk_posts():
    body = decoded()
    assert (body.sampling_session_id, body.seq_id, body.record_stability_info) == ("s1:sample:0", 0, False)
    assert body.sample == Sample(
        sampler_id="",
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=4, temperature=0.7, top_k=5, top_p=0.9, stop=("\n",), seed=1),
        num_samples=2,
        prompt_logprobs=True,
    )


def test_the_sdks_own_model_is_read_whole():
    sdk = SampleRequest.model_validate(
        sample_body(topk_prompt_logprobs=3, prompt_logprobs_last_n=2, prompt_alt_tokens_k=4, topk_sample_logprobs=5)
    )
    body = wire.decode_sample(sdk.model_dump_json(exclude_none=True).encode())
    assert body.sample.topk_prompt_logprobs == 3
    assert body.sample.prompt_logprobs_last_n == 2
    assert body.sample.prompt_alt_tokens == 4
    assert body.sample.topk_sample_logprobs == 5


def test_what_is_left_out_has_the_apis_defaults():
    body = wire.decode_sample(json_bytes({"prompt": tokens([7]), "base_model": "tiny", "unheard_of": {"x": 1}}))
    assert (body.base_model, body.sampling_session_id, body.seq_id) == ("tiny", None, None)
    assert body.sample == Sample("", (7,), SamplingParams())


def test_nulls_count_as_left_out():
    nulls = {
        "sampling_params": None,
        "seq_id": None,
        "prompt_logprobs": None,
        "model_path": "tinker://x",
        "record_stability_info": None,
    }
    body = wire.decode_sample(json_bytes({"prompt": tokens([7])} | nulls))
    assert body.sample == Sample("", (7,), SamplingParams())


@pytest.mark.parametrize(
    ("stop", "noun"),
    [
        (None, None),
        ([], ()),
        ("\n\nUser:", "\n\nUser:"),
        (["a", "b"], ("a", "b")),
        ([2, 7], (2, 7)),
    ],
)
def test_stop_forms(stop, noun):
    """Absent: EOS stops. Empty: nothing does. The two are not the same."""
    given = {name: value for name, value in params(stop=stop).items() if value is not None}
    assert decoded(sampling_params=given).sample.params.stop == noun


def test_prompt_chunks_are_joined_and_seq_ids_are_64_bits_wide():
    body = decoded(prompt=tokens([1], [], [2, 3], [2**31 - 1]), seq_id=55868337000000000)
    assert body.sample.prompt == (1, 2, 3, 2**31 - 1)
    assert body.seq_id == 55868337000000000


def test_target_logprobs_dense_and_sparse():
    targets = np.array([[5, -1], [-1, 6]])
    dense = decoded(target_prompt_logprobs={"data": [5, -1, -1, 6], "dtype": "int64", "shape": [2, 2]})
    np.testing.assert_array_equal(dense.sample.target_prompt_logprobs, targets)
    assert dense.target_layout is None
    listed = csr_tensor(np.array([[5, 0], [0, 6]]))
    sparse = decoded(
        target_prompt_logprobs={
            "data": listed.data,
            "dtype": "int64",
            "shape": listed.shape,
            "sparse_crow_indices": listed.sparse_crow_indices,
            "sparse_col_indices": listed.sparse_col_indices,
        }
    )
    np.testing.assert_array_equal(sparse.sample.target_prompt_logprobs, targets)
    assert sparse.target_layout is not None
    assert (sparse.target_layout.rows.tolist(), sparse.target_layout.columns.tolist()) == ([0, 1], [0, 1])


def test_the_digest_tells_requests_apart_by_what_they_ask():
    one = decoded().digest
    assert decoded(seq_id=1, sampling_session_id="other", prompt=tokens([1, 2], [3])).digest == one
    others = [
        decoded(prompt=tokens([1, 2, 4])),
        decoded(num_samples=3),
        decoded(sampling_params=params(seed=2)),
        decoded(record_stability_info=True),
        decoded(target_prompt_logprobs={"data": [5, 6], "dtype": "int64", "shape": [2, 1]}),
        decoded(target_prompt_logprobs={"data": [5, 7], "dtype": "int64", "shape": [2, 1]}),
    ]
    assert len({one, *(other.digest for other in others)}) == 7


def test_refusals():
    assert "The prompt is empty" in refused(prompt=tokens([]))
    assert "The prompt is empty" in refused(prompt={"chunks": []})
    assert "does not say what to sample from" in refused(sampling_session_id=None)
    assert "seq_id is missing" in refused(seq_id=None)
    assert "prompt.chunks[1] is not text. Got: an image." in refused(
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}, {"type": "image", "data": "", "format": "png"}]}
    )
    assert "Got: an image." in refused(prompt={"chunks": [{"type": "image_asset_pointer", "location": "x"}]})
    assert "Got: audio." in refused(prompt={"chunks": [{"type": "dmel", "dmel": ""}]})
    assert "Got: ['x']." in refused(prompt={"chunks": [{"type": ["x"]}]})
    assert "prompt.chunks[0].tokens is not a list" in refused(422, prompt={"chunks": [{"type": "encoded_text"}]})
    assert 'prompt is not {"chunks": [...]}' in refused(422, prompt={})
    assert "prompt does not hold integers. Got: True at 0" in refused(422, prompt=tokens([True]))
    assert "prompt_logprobs_last_n asks for nothing" in refused(prompt_logprobs=False, prompt_logprobs_last_n=1)
    assert "Got: 3. Expected: 1 to 2 for a prompt of 3 tokens" in refused(prompt_logprobs_last_n=3)
    assert "Expected: 1 to 0" in refused(prompt_logprobs_last_n=1, prompt=tokens([1]))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_tokens", 0, "sampling_params.max_tokens: Input should be greater than or equal to 1 (got 0)"),
        ("max_tokens", 1.5, "sampling_params.max_tokens: Input should be a valid integer"),
        ("temperature", -0.1, "sampling_params.temperature: Input should be greater than or equal to 0"),
        ("top_p", 0, "sampling_params.top_p: Input should be greater than 0"),
        ("top_p", 1.1, "sampling_params.top_p: Input should be less than or equal to 1"),
        ("top_k", -2, "sampling_params.top_k"),
        ("seed", 2**63, "sampling_params.seed"),
    ],
)
def test_sampling_params_out_of_range(field, value, text):
    assert text in refused(422, sampling_params=params(**{field: value}))


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["a", 1], "sampling_params.stop mixes kinds"),
        ([True], "sampling_params.stop mixes kinds"),
        ([[1]], "sampling_params.stop mixes kinds"),
        ([""], "can stop nothing. Got: ''"),
        ("", "can stop nothing. Got: ''"),
        ([-1], "can stop nothing. Got: -1"),
        (["x" * 1025], "Expected: 1 to 1024 characters, or a token id"),
        (["x"] * 257, "too many entries. Got: 257"),
    ],
)
def test_stops_that_can_stop_nothing(stop, text):
    assert text in refused(sampling_params=params(stop=stop))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", 0),
        ("num_samples", 4097),
        ("topk_prompt_logprobs", -1),
        ("topk_sample_logprobs", 1025),
        ("prompt_alt_tokens_k", True),
        ("seq_id", -1),
        ("sampling_session_id", ""),
        ("sampling_session_id", "a\x00b"),
        ("sampling_session_id", "x" * 513),
        ("base_model", "a\x00b"),
        ("prompt_logprobs", 7),
    ],
)
def test_fields_out_of_range_are_named(field, value):
    assert refused(422, **{field: value}).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "tensor",
    [
        {"data": [5.0, 6.0], "dtype": "float32", "shape": [2, 1]},
        {"data": [5, 6], "dtype": "int64"},
        {"data": [5, 6, 7], "dtype": "int64", "shape": [3, 1]},
        {"data": [5, 6, 7], "dtype": "int64", "shape": [2, 1]},
        {"data": [], "dtype": "int64", "shape": [2, -1]},
    ],
)
def test_target_logprobs_that_do_not_match_the_prompt(tensor):
    assert "target_prompt_logprobs" in refused(target_prompt_logprobs=tensor)
