"""Messages between policy server and client, in both directions, and invalid ones."""

import pickle

import msgspec
import numpy as np
import pytest

from rollbook.contracts.errors import EpisodeError, FencedError, RunError, TransientError
from rollbook.contracts.policy import Completion, FinishReason, TokenChunk
from rollbook.inference.connection import error_of
from rollbook.inference.request import BadRequestError, seeded_uniforms
from rollbook.inference.wire.completions import (
    CompletionBody,
    TokenCompletion,
    TokenReply,
    VersionSpan,
    token_versions,
    version_spans,
)
from rollbook.inference.wire.token_stream import StreamedOutcome, StreamMismatchError
from rollbook.inference.wire.weights import WeightInfo
from tests.parts.inference.models import publication


def test_a_completion_crosses_the_wire_bit_by_bit_and_does_not_keep_the_response() -> None:
    completion = Completion(
        token_ids=np.array([5, 0, 7], np.int32),
        logprobs=np.array([-0.1, -1e-7, -33.3], np.float32),
        versions=np.array([4, 4, 6], np.int32),
        finish_reason=FinishReason.ABORT,
    )
    sent = msgspec.msgpack.encode(TokenReply(completions=[TokenCompletion.of(completion)]))
    received = msgspec.msgpack.decode(sent, type=TokenReply).completions[0].to_contract()
    assert received.token_ids.tolist() == [5, 0, 7]
    assert received.logprobs.tobytes() == completion.logprobs.tobytes()
    assert received.versions.tolist() == [4, 4, 6]
    assert received.finish_reason is FinishReason.ABORT
    assert all(array.flags.owndata for array in (received.token_ids, received.logprobs, received.versions))


def sampled_completion() -> Completion:
    return Completion(
        token_ids=np.array([5, 0, 7], np.int32),
        logprobs=np.array([-0.1, -1e-7, -33.3], np.float32),
        versions=np.array([4, 4, 6], np.int32),
        finish_reason=FinishReason.STOP,
        generation_s=0.5,
    )


def chunk(completion: Completion, start: int, end: int) -> TokenChunk:
    return TokenChunk(
        token_ids=completion.token_ids[start:end],
        logprobs=completion.logprobs[start:end],
        versions=completion.versions[start:end],
    )


@pytest.mark.parametrize("num_streamed", [0, 1, 3])
def test_an_outcome_repeats_no_streamed_token_and_completes_them(num_streamed: int) -> None:
    completion = sampled_completion()
    sent = msgspec.msgpack.encode(StreamedOutcome.of(1, completion, num_streamed=num_streamed))
    outcome = msgspec.msgpack.decode(sent, type=StreamedOutcome)
    assert outcome.completion is not None
    assert len(outcome.completion.token_ids) == 4 * (3 - num_streamed), "bytes of int32 tokens"
    joined = outcome.joined([chunk(completion, at, at + 1) for at in range(num_streamed)])
    assert joined.token_ids.tolist() == completion.token_ids.tolist()
    assert joined.logprobs.tobytes() == completion.logprobs.tobytes()
    assert joined.versions.tolist() == completion.versions.tolist()
    assert (joined.finish_reason, joined.generation_s) == (FinishReason.STOP, 0.5)


def test_streamed_tokens_that_the_engine_did_not_sample_are_noticed() -> None:
    completion = sampled_completion()
    outcome = StreamedOutcome.of(1, completion, num_streamed=2)
    other = chunk(completion, 0, 2)
    for changed in (
        [],
        [chunk(completion, 0, 1)],
        [chunk(completion, 0, 3)],
        [msgspec.structs.replace(other, token_ids=other.token_ids + 1)],
        [msgspec.structs.replace(other, logprobs=other.logprobs * 2)],
        [msgspec.structs.replace(other, versions=other.versions - 1)],
    ):
        with pytest.raises(StreamMismatchError, match="are not the 2 that were sampled"):
            outcome.joined(changed)


def test_arrays_of_different_lengths_are_invalid() -> None:
    three, two = np.zeros(3, np.int32).data, np.zeros(2, np.int32).data
    with pytest.raises(ValueError, match="3 ids, 3 logprobs, 2 versions"):
        TokenCompletion(three, three, two, FinishReason.STOP).to_contract()


def test_spans_join_equal_versions_and_can_be_expanded_again() -> None:
    versions = np.array([3, 3, 5, 5, 5, 6], np.int32)
    assert version_spans(versions) == [VersionSpan(3, 0, 2), VersionSpan(5, 2, 5), VersionSpan(6, 5, 6)]
    assert token_versions(version_spans(versions), 6).tolist() == versions.tolist()
    assert version_spans(versions[:3], offset=10) == [VersionSpan(3, 10, 12), VersionSpan(5, 12, 13)]
    assert version_spans(versions[:0]) == []


@pytest.mark.parametrize(
    "broken",
    [
        [VersionSpan(1, 0, 2)],
        [VersionSpan(1, 0, 2), VersionSpan(1, 1, 3)],
        [VersionSpan(1, 0, 4)],
        [VersionSpan(1, 1, 3)],
        [VersionSpan(1, 0, 0), VersionSpan(1, 0, 3)],
    ],
)
def test_spans_that_do_not_cover_all_tokens_are_invalid(broken: list[VersionSpan]) -> None:
    with pytest.raises(ValueError, match="token"):
        token_versions(broken, 3)


def test_versions_may_be_texts() -> None:
    assert token_versions([VersionSpan("7", 0, 2)], 2).tolist() == [7, 7]


def test_unpublished_weights_have_the_version_that_vllm_uses() -> None:
    assert WeightInfo.of(None).weight_version == "default"
    assert WeightInfo.of(None).to_contract() is None
    assert WeightInfo.of(publication(3, "d")).to_contract() == publication(3, "d")


def test_a_prompt_is_text_or_ids_or_lists_of_them_but_not_a_mixture() -> None:
    assert CompletionBody(prompt=[1, 2]).prompts() == [[1, 2]]
    assert CompletionBody(prompt=[[1], [2, 3]]).prompts() == [[1], [2, 3]]
    assert CompletionBody(prompt="text").prompts() == ["text"]
    assert CompletionBody(prompt=["a", "b"]).prompts() == ["a", "b"]
    for prompt in ([], [1, [2]], ["a", 1]):
        with pytest.raises(ValueError, match="prompt"):
            CompletionBody(prompt=prompt).prompts()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (503, "stale_weights", TransientError),
        (500, "unknown", TransientError),
        (429, "busy", TransientError),
        (500, "generation_failed", EpisodeError),
        (400, "BadRequestError", EpisodeError),
        (409, "outdated_update", FencedError),
        (404, "HTTPNotFound", RunError),
    ],
)
def test_status_and_type_decide_the_class_of_the_error(status: int, kind: str, expected: type[Exception]) -> None:
    body = msgspec.json.encode({"error": {"message": "m", "type": kind, "code": status}})
    error = error_of(status, body, "0.25", where="http://there")
    assert isinstance(error, expected)
    assert "http://there" in str(error)
    if isinstance(error, TransientError):
        assert error.retry_after_s == 0.25


def test_an_error_body_that_is_not_json_is_quoted() -> None:
    assert "bad gateway" in str(error_of(502, b"<html>bad gateway", "soon", where="x"))


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(BadRequestError("too long", param="prompt")))
    assert (str(error), error.param) == ("too long", "prompt")


def test_seeded_uniforms_are_spread_and_differ_by_seed_and_position() -> None:
    drawn = seeded_uniforms(range(40), [50] * 40)
    assert len(np.unique(drawn)) == len(drawn)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert (seeded_uniforms([7], [30], start=20) == drawn[7 * 50 + 20 : 8 * 50]).all()
    assert (
        seeded_uniforms([3, 7], [5, 50]) == np.concatenate([drawn[3 * 50 : 3 * 50 + 5], drawn[7 * 50 : 8 * 50]])
    ).all()
    assert np.histogram(drawn, bins=10, range=(0, 1))[0].min() > 140
