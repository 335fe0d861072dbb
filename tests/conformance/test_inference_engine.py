"""The behaviour of every engine."""

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import FinishReason, SamplingParams, TokenChunk
from rollbook.contracts.weights import WeightsError
from rollbook.inference.engine import EngineClosedError, EngineQueueFullError, UnpublishedError
from rollbook.inference.pause import OutdatedUpdateError, PauseMode
from rollbook.inference.request import BadRequestError
from rollbook.inference.weights.safetensors import read_weights
from rollbook.telemetry.spans import SpanRecorder, read_spans
from tests.parts.inference.engines import TinyModel, until
from tests.parts.inference.models import MAX_LEN, VOCAB, publication

LONG = SamplingParams(max_tokens=200)


@pytest.fixture(params=["scripted", "transformers"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("tiny"))


async def test_a_completion_has_as_many_tokens_as_requested(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=5))
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == 5
        assert ((completion.token_ids >= 0) & (completion.token_ids < VOCAB)).all()
        assert (completion.logprobs <= 0).all()
        assert completion.versions.tolist() == [1] * 5


async def test_the_scores_of_a_prompt_have_the_publication_that_computed_them(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        first = await engine.score([1, 2, 3], top_logprobs=2)
        await engine.load_weights(*tiny.weights(2))
        second = await engine.score([1, 2, 3])
    assert (first.publication, second.publication) == (1, 2)
    assert first.logprobs.shape == second.logprobs.shape == (2,)
    assert first.tops is not None
    assert first.tops.token_ids.shape == (2, 2)


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        every_token = tuple(range(VOCAB))
        completion = await engine.generate([1], SamplingParams(max_tokens=9, stop_token_ids=every_token))
        assert completion.finish_reason is FinishReason.STOP
        assert len(completion.token_ids) == 1


async def test_a_completion_ends_where_the_models_length_ends(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, max_model_len=10) as engine:
        completion = await engine.generate([1] * 7, SamplingParams(max_tokens=50))
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1] * MAX_LEN, "max_model_len"),
        ([1, VOCAB], "position 1"),
        ([1, 2**40], "position 1"),
        ([-1], "vocabulary"),
    ],
)
async def test_an_invalid_prompt_is_refused_at_once(
    tiny: TinyModel, name: str, prompt: list[int], message: str
) -> None:
    async with tiny.engine(name) as engine:
        with pytest.raises(BadRequestError, match=message):
            await engine.generate(prompt, SamplingParams())
        assert len((await engine.generate([1], SamplingParams(max_tokens=1))).token_ids) == 1


async def test_requests_are_refused_before_weights_are_published(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, published=None) as engine:
        assert engine.publication is None
        with pytest.raises(UnpublishedError):
            engine.submit([1], SamplingParams())


async def test_the_same_seed_gives_the_same_tokens_in_any_batch(tiny: TinyModel, name: str) -> None:
    seeded = SamplingParams(max_tokens=20, seed=7)
    async with tiny.engine(name) as engine:
        alone = await engine.generate([3, 4], seeded)
        await engine.pause(PauseMode.KEEP)
        others = [engine.submit([number % VOCAB] * (number + 1), SamplingParams(max_tokens=9)) for number in range(12)]
        batched_future = engine.submit([3, 4], seeded)
        await engine.resume()
        batched = await batched_future
        await asyncio.gather(*others)
        other = await engine.generate([3, 4], SamplingParams(max_tokens=20, seed=8))
    assert batched.token_ids.tolist() == alone.token_ids.tolist()
    assert other.token_ids.tolist() != alone.token_ids.tolist()


async def test_new_requests_join_a_running_batch(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        long = engine.submit([1, 2], LONG)
        await until(lambda: engine.stats().tokens >= 1)
        await engine.pause(PauseMode.KEEP)
        assert not long.done()
        finished: list[str] = []
        long.add_done_callback(lambda _: finished.append("long"))
        short = [engine.submit([n], SamplingParams(max_tokens=3)) for n in range(10)]
        for future in short:
            future.add_done_callback(lambda _: finished.append("short"))
        await engine.resume()
        assert [len(completion.token_ids) for completion in await asyncio.gather(*short)] == [3] * 10
        await long
        assert finished == ["short"] * 10 + ["long"]
        # All tokens were decoded in the 200 steps of the long request; one request after the other needs 230.
        assert engine.stats().steps <= 200
        assert engine.stats().tokens == 230


async def test_no_more_requests_run_than_slots_and_the_others_follow_in_order(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, max_running=2) as engine:
        await engine.pause(PauseMode.KEEP)
        order: list[int] = []
        futures = [engine.submit([number], SamplingParams(max_tokens=4)) for number in range(7)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, n=number: order.append(n))  # type: ignore[misc]
        await engine.resume()
        await asyncio.gather(*futures)
        assert order == list(range(7))
        # A step samples at most one token in each of the two slots, and there are 28 tokens.
        assert engine.stats().steps >= 28 // 2


async def test_cancelling_frees_the_slot(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, max_running=1) as engine:
        long = engine.submit([1], LONG)
        await until(lambda: engine.stats().tokens >= 2)
        await engine.pause(PauseMode.KEEP)
        sampled = engine.stats().tokens
        long.cancel()
        # The cancellation reaches the engine with the next iterations of the event loop, and `resume` must come after it.
        await asyncio.sleep(0.01)
        next_in_slot = engine.submit([2], SamplingParams(max_tokens=2))
        await engine.resume()
        assert len((await next_in_slot).token_ids) == 2
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().tokens == sampled + 2


async def test_cancelling_a_waiting_request_removes_it_from_the_queue(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        await engine.pause(PauseMode.KEEP)
        waiting = engine.submit([1], LONG)
        waiting.cancel()
        await engine.resume()
        await engine.generate([2], SamplingParams(max_tokens=1))
        assert engine.stats().tokens == 1
        assert engine.stats().queued == 0


async def test_weights_loaded_during_a_request_stamp_the_tokens_after_them(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        numbers = itertools.count(2)
        has_update_inside = False
        async with asyncio.timeout(60):
            while not has_update_inside:
                number = next(numbers)
                running = engine.submit([1, 2, 3], LONG)
                await until(lambda: engine.stats().running == 1)
                await engine.load_weights(*tiny.weights(number))
                versions = (await running).versions
                assert (np.diff(versions) >= 0).all()
                assert set(versions.tolist()) <= {number - 1, number}
                has_update_inside = len(set(versions.tolist())) == 2


async def test_pause_keep_suspends_running_requests_and_resume_lets_them_finish(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        running = engine.submit([1, 2], LONG)
        await until(lambda: engine.stats().tokens >= 2)
        await engine.pause(PauseMode.KEEP)
        assert engine.is_paused
        sampled = engine.stats().tokens
        new = engine.submit([5], SamplingParams(max_tokens=1))
        await engine.load_weights(*tiny.weights(2))
        assert engine.stats().tokens == sampled < 200
        assert not running.done()
        assert not new.done()
        await engine.resume()
        # The stamps show that no token was sampled between the pause and the new weights.
        assert (await running).versions.tolist() == [1] * sampled + [2] * (200 - sampled)
        assert (await new).versions.tolist() == [2]


async def test_pause_wait_lets_running_requests_finish_and_starts_none(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        running = engine.submit([1, 2], SamplingParams(max_tokens=60))
        await until(lambda: engine.stats().tokens >= 2)
        pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
        await until(lambda: engine.is_paused)
        new = engine.submit([5], SamplingParams(max_tokens=1))
        await pausing
        assert engine.stats().running == 0
        assert len((await running).token_ids) == 60
        assert not new.done()
        await engine.resume()
        assert len((await new).token_ids) == 1


async def test_pause_abort_ends_running_requests_with_their_tokens_so_far(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        running = engine.submit([1, 2], LONG)
        await until(lambda: engine.stats().tokens >= 2)
        await engine.pause(PauseMode.ABORT)
        completion = await running
        assert completion.finish_reason is FinishReason.ABORT
        assert 2 <= len(completion.token_ids) < 200
        await engine.resume()
        assert len((await engine.generate([1], SamplingParams(max_tokens=1))).token_ids) == 1


async def test_pausing_twice_and_resuming_without_a_pause_are_harmless(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        await engine.resume()
        await engine.pause(PauseMode.WAIT)
        await engine.pause(PauseMode.KEEP)
        await engine.resume()
        assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2


async def test_resume_ends_a_pause_that_still_waits(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        running = engine.submit([1, 2], LONG)
        await until(lambda: engine.stats().tokens >= 2)
        pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
        await until(lambda: engine.is_paused)
        await engine.resume()
        await pausing
        assert len((await running).token_ids) == 200


async def test_weights_whose_digest_differs_are_refused_and_nothing_changes(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        _, path = tiny.weights(2)
        with pytest.raises(WeightsError, match="digest"):
            await engine.load_weights(publication(2, "0" * 32), path)
        with pytest.raises(RunError, match="cannot be read"):
            await engine.load_weights(publication(2, "0" * 32), path.with_name("missing"))
        assert engine.publication is not None
        assert engine.publication.id == 1
        assert (await engine.generate([1], SamplingParams(max_tokens=1))).versions.tolist() == [1]


async def test_outdated_updates_are_refused_and_a_repeated_one_is_harmless(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, published=None) as engine:
        await engine.load_weights(*tiny.weights(5, epoch=3))
        await engine.load_weights(*tiny.weights(5, epoch=3))
        with pytest.raises(OutdatedUpdateError, match="epoch 3"):
            await engine.load_weights(*tiny.weights(6, epoch=2))
        with pytest.raises(OutdatedUpdateError, match="newer publication 5"):
            await engine.load_weights(*tiny.weights(4, epoch=3))
        await engine.load_weights(*tiny.weights(6, epoch=4))
        assert engine.publication is not None
        assert engine.publication.id == 6


async def test_a_full_queue_refuses_requests_until_it_is_emptied(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, max_queued=3) as engine:
        await engine.pause(PauseMode.KEEP)
        waiting = [engine.submit([1], SamplingParams(max_tokens=1)) for _ in range(3)]
        with pytest.raises(EngineQueueFullError) as caught:
            engine.submit([1], SamplingParams(max_tokens=1))
        assert caught.value.retry_after_s is not None
        assert engine.stats().queued == 3
        await engine.resume()
        await asyncio.gather(*waiting)
        await engine.generate([1], SamplingParams(max_tokens=1))


async def test_requests_in_a_closing_engine_fail(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        running = engine.submit([1], LONG)
        await until(lambda: engine.stats().tokens >= 1)
        await engine.pause(PauseMode.KEEP)
        waiting = engine.submit([1], LONG)
    with pytest.raises(EngineClosedError):
        await running
    with pytest.raises(EngineClosedError):
        await waiting


async def test_a_closed_engine_refuses_requests_and_commands(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        await engine.generate([1], SamplingParams(max_tokens=1))
    with pytest.raises(EngineClosedError):
        await engine.generate([1], SamplingParams(max_tokens=1))
    with pytest.raises(EngineClosedError):
        await engine.pause(PauseMode.WAIT)


async def test_busy_periods_and_updates_are_recorded_as_spans(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    spans = SpanRecorder("policy", tmp_path / "spans.jsonl")
    async with tiny.engine(name, spans=spans) as engine:
        await asyncio.gather(*(engine.generate([n], SamplingParams(max_tokens=3)) for n in range(4)))
        await engine.load_weights(*tiny.weights(2))
        await engine.generate([9], SamplingParams(max_tokens=5))
    recorded = read_spans(tmp_path / "spans.jsonl")
    spans.close()
    busy = [span for span in recorded if span.name == "policy.generate"]
    assert {span.fields["publication"] for span in busy} == {1, 2}
    assert sum(span.fields["requests"] for span in busy) == 5
    assert sum(span.fields["tokens"] for span in busy) == 17
    assert [s.fields["publication"] for s in recorded if s.name == "policy.update_weights"] == [1, 2]


async def test_a_stream_gets_every_token_once_and_before_the_completion(tiny: TinyModel, name: str) -> None:
    chunks: list[TokenChunk] = []
    streamed_at_completion: list[int] = []
    async with tiny.engine(name) as engine:
        future = engine.submit([1, 2], SamplingParams(max_tokens=30), on_tokens=chunks.append)
        future.add_done_callback(lambda _: streamed_at_completion.append(sum(len(chunk.token_ids) for chunk in chunks)))
        not_streamed = engine.submit([2], SamplingParams(max_tokens=30))
        completion = await future
        await not_streamed
    assert len(chunks) > 2
    assert streamed_at_completion == [30]
    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == completion.token_ids.tolist()
    assert np.concatenate([chunk.logprobs for chunk in chunks]).tolist() == completion.logprobs.tolist()
    assert np.concatenate([chunk.versions for chunk in chunks]).tolist() == completion.versions.tolist()


async def test_tensors_in_memory_are_loaded_like_a_file_and_have_the_same_digest(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        published, path = tiny.weights(2)
        await engine.load_tensors(published, read_weights(path))
        assert engine.publication == published
        assert await engine.weights_digest() == published.digest
        completion = await engine.generate([1], SamplingParams(max_tokens=3))
        assert completion.versions.tolist() == [2] * 3


async def test_tensors_in_memory_that_are_not_the_published_ones_are_refused(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name) as engine:
        published, _ = tiny.weights(3)
        _, other_path = tiny.weights(2)
        with pytest.raises(WeightsError, match="announced with"):
            await engine.load_tensors(published, read_weights(other_path))
        assert engine.publication is not None
        assert engine.publication.id == 1


async def test_abort_all_ends_running_and_waiting_requests_with_their_tokens_so_far(tiny: TinyModel, name: str) -> None:
    async with tiny.engine(name, max_running=1) as engine:
        running, waiting = engine.submit([1], LONG), engine.submit([2], LONG)
        await until(lambda: engine.stats().tokens >= 3)
        assert await engine.abort_all() == 2
        ended = await asyncio.gather(running, waiting)
        assert [completion.finish_reason for completion in ended] == [FinishReason.ABORT] * 2
        assert len(ended[0].token_ids) >= 3
        assert len(ended[1].token_ids) == 0
        assert engine.stats().queued == 0
        assert not engine.is_paused
        assert len((await engine.generate([1], SamplingParams(max_tokens=2))).token_ids) == 2


async def test_the_stats_say_how_an_update_affects_the_cache(tiny: TinyModel, name: str) -> None:
    for setting in ("keep", "recompute"):
        async with tiny.engine(name, kv_after_update=setting) as engine:
            assert engine.stats().kv_after_update == setting
