"""What an engine does when its device or a part of it fails: the requests concerned fail, and the engine continues. Without memory,
its cache shrinks and requests wait."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.weights import RawTensor, TensorSource, WeightsError
from rollbook.inference.engine import EngineClosedError, GenerationError, UnpublishedError
from rollbook.inference.engines.embedded import build
from rollbook.inference.engines.embedded.live_weights import LiveWeights, LoadPlan, Upload
from rollbook.inference.engines.embedded.model.llama import LlamaForward, relative_error
from rollbook.inference.engines.embedded.model.packed import PackedTorchOps
from rollbook.inference.engines.embedded.paged.batch import PagedBatch
from rollbook.inference.engines.embedded.paged.block_cache import BlockCache
from rollbook.inference.engines.embedded.paged.runner import PackedRunner
from rollbook.inference.engines.embedded.runner import PendingResults, Runner
from rollbook.inference.pause import PauseMode
from tests.models.families import Family
from tests.parts.inference.engines import (
    TinyModel,
    assert_faithful,
    embedded,
    some_prompts,
    until,
)
from tests.parts.inference.models import VOCAB, publish


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


def fail_at_call(
    monkeypatch: pytest.MonkeyPatch, number: int, owner: object, name: str, error: Exception | None = None
) -> None:
    method, calls = getattr(owner, name), count(1)

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error or RuntimeError("device failure")
        return method(*args, **options)

    monkeypatch.setattr(owner, name, failing)


async def test_a_cache_that_the_device_cannot_hold_is_refused_at_the_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: BlockCache, num_blocks: int) -> None:
        raise torch.OutOfMemoryError(f"no memory for {num_blocks} blocks")

    monkeypatch.setattr(BlockCache, "resize", refuse)
    with pytest.raises(RunError, match=r"lower inference\.kv_memory_mb") as refused:
        async with embedded(TinyModel(root=root), is_captured=True, kv_memory_mb=10):
            pass
    assert is_out_of_memory(refused.value), "the plan is added to the report"


async def test_a_missing_device_is_named_in_the_error(root: Path) -> None:
    if torch.backends.mps.is_available() or torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for device in ("cuda", "mps"):
        with pytest.raises(RunError, match=device):
            async with embedded(TinyModel(root=root), device=device):
                raise AssertionError("the engine must not open")


def test_kernels_that_fail_leave_torch_operations_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("0 active drivers")

    here: dict[str, Any] = {"kernels_missing": None, "why_not_here": lambda: None, "packed_error": fail}
    unsplit: list[bool] = []
    here |= {"KernelOps": PackedTorchOps, "set_unsplit_products": lambda *, is_unsplit: unsplit.append(is_unsplit)}
    for name, value in here.items():
        monkeypatch.setattr(build, name, value)
    module = Family("deep", "qwen2", {"intermediate_size": 192}).model().bfloat16().requires_grad_(False)
    llama = LlamaForward(module, max_model_len=64)
    choices: list[str] = []
    assert not build.use_kernels(llama, module, choices, exactness="bitwise")
    assert choices == ["kernels: torch, because RuntimeError: 0 active drivers"]
    assert unsplit == [True, False]
    assert relative_error(llama, module) < 0.25


@pytest.mark.parametrize("ahead", [0, 3])
async def test_a_failed_forward_fails_its_requests_and_the_engine_continues(
    root: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, steps_ahead=ahead, max_running=4) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, Runner)
        fail_at_call(monkeypatch, 6, runner, "decode")
        # Limits around the failure: some requests have launched all their tokens when it happens.
        futures = [engine.submit([n], SamplingParams(max_tokens=n + 4)) for n in range(8)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, GenerationError)]
        assert failed
        assert all("device failure" in str(outcome) for outcome in failed)
        assert all(isinstance(outcome, GenerationError | Completion) for outcome in outcomes)
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
        assert engine.stats().running == engine.stats().queued == 0
    assert_faithful(tiny, [1, 2, 3], completion)


class _BrokenConstraint:
    """Allows every token and fails when one is reported."""

    def allowed(self) -> NDArray[np.uint8]:
        return np.full(-(-VOCAB // 8), 255, dtype=np.uint8)

    def accept(self, token_id: int) -> None:
        raise RuntimeError(f"token {token_id} is not accepted")


@pytest.mark.parametrize("is_captured", [False, True])
async def test_requests_at_their_limit_fail_too_when_the_results_of_their_round_cannot_be_processed(
    root: Path, is_captured: bool
) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=is_captured, steps_ahead=2) as engine:
        broken = engine.submit([1], SamplingParams(max_tokens=5), constraint=_BrokenConstraint())
        ending = [engine.submit([n], SamplingParams(max_tokens=1, top_logprobs=2)) for n in range(3)]
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(broken, *ending, return_exceptions=True)
        assert all("is not accepted" in str(outcome) for outcome in outcomes)
        assert engine.stats().running == engine.stats().queued == 0
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
    assert_faithful(tiny, [1, 2, 3], completion)


async def test_tokens_that_are_not_numbers_are_not_counted(root: Path, tmp_path: Path) -> None:
    tiny = TinyModel(root=root)
    broken = tiny.model(1)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    path = tmp_path / "broken.safetensors"
    async with embedded(tiny, is_captured=True, steps_ahead=3) as engine:
        await engine.load_weights(publish(path, broken, 2), path)
        outcomes = await asyncio.gather(
            *(engine.generate([n], SamplingParams(max_tokens=20)) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(outcome, GenerationError) for outcome in outcomes)
        await engine.load_weights(*tiny.weights(3))
        await engine.generate([1, 2], SamplingParams(max_tokens=20))
        assert engine.stats().tokens == 20


async def test_requests_that_finished_before_a_failure_of_the_device_during_a_pause_are_returned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    wait = PendingResults.wait
    calls: list[int] | None = None

    def failing_wait(self: PendingResults) -> Any:
        if calls is not None:
            calls.append(0)
            if len(calls) == 3:
                raise RuntimeError("device failure")
        return wait(self)

    monkeypatch.setattr(PendingResults, "wait", failing_wait)
    async with embedded(tiny, is_captured=True, steps_ahead=3) as engine:
        drain = engine.parts.scheduler.drain

        def observed_drain(*args: Any) -> Any:
            nonlocal calls
            calls = []
            return drain(*args)

        monkeypatch.setattr(engine.parts.scheduler, "drain", observed_drain)
        futures = [engine.submit([n % VOCAB], SamplingParams(max_tokens=n + 1)) for n in range(100)]
        await until(lambda: engine.stats().tokens > 1000)
        async with asyncio.timeout(10):
            await engine.pause(PauseMode.KEEP)
            await engine.resume()
            outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert calls is not None
        assert len(calls) >= 3
        assert {type(outcome) for outcome in outcomes} == {Completion, GenerationError}
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Completion):
                assert_faithful(tiny, [number % VOCAB], outcome)


async def test_a_cache_that_cannot_grow_continues_with_its_blocks(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollbook.inference.engines.embedded.build.FIRST_SHARE", 0.0)
    tiny = TinyModel(root=root)
    prompts = some_prompts(8, 20, 60, seed=8)
    async with embedded(tiny, is_captured=True, steps_ahead=2) as engine:
        runner, batch = engine.parts.runner, engine.parts.scheduler.batch
        assert isinstance(runner, PackedRunner)
        assert isinstance(batch, PagedBatch)
        capacity, generation, empty = batch.pool.capacity, runner.cache.generation, torch.empty
        failures = 0

        def failing_empty(*size: int, **options: Any) -> torch.Tensor:
            nonlocal failures
            # The first layer grows, the second does not.
            if len(size) == 5 and size[0] > capacity and len(runner.cache.layers[0]) > capacity:
                failures += 1
                raise torch.OutOfMemoryError("out of memory")
            return empty(*size, **options)

        monkeypatch.setattr(torch, "empty", failing_empty)
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=100)) for p in prompts))
        assert failures == 1
        assert "kv_memory_mb" in caplog.text
        assert engine.parts.scheduler.preemptions > 0
        assert batch.pool.capacity == capacity
        # The first layer has moved, so captured graphs are not used again.
        assert runner.cache.generation > generation
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


async def test_slots_of_unequal_size_are_not_used_after_a_failed_allocation(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    prompts = some_prompts(6, 20, 40, seed=3)
    async with embedded(tiny) as engine:
        zeros, calls = torch.zeros, 0

        def failing_zeros(*args: Any, **options: Any) -> torch.Tensor:
            nonlocal calls
            if isinstance(args[0], tuple) and len(args[0]) == 5:
                calls += 1
                if calls == 2:
                    raise RuntimeError("out of memory")
            return zeros(*args, **options)

        monkeypatch.setattr(torch, "zeros", failing_zeros)
        failed = await asyncio.gather(
            *(engine.generate(prompt, SamplingParams(max_tokens=9)) for prompt in prompts), return_exceptions=True
        )
        assert all(isinstance(outcome, GenerationError) for outcome in failed)
        completion = await engine.generate(prompts[0], SamplingParams(max_tokens=9))
    assert_faithful(tiny, prompts[0], completion)


async def test_a_closed_engine_refuses_weights_as_it_refuses_requests(root: Path) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny) as engine:
        pass
    for call in (engine.load_weights(*tiny.weights(2)), engine.weights_digest(), engine.base_digest()):
        with pytest.raises(EngineClosedError):
            await call


async def test_an_engine_whose_thread_fails_ends_its_requests_and_the_task_that_opened_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise AssertionError("a block is free twice")

    requests: list[asyncio.Future[Completion]] = []

    async def serve() -> None:
        async with embedded(TinyModel(root=root), max_running=1) as engine:
            monkeypatch.setattr(engine.parts.scheduler, "cancel", fail)
            requests.extend(engine.submit([n], SamplingParams(max_tokens=400)) for n in range(3))
            await until(lambda: engine.stats().running == 1)
            requests[0].cancel()
            async with asyncio.timeout(10):
                await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="a block is free twice"):
        await serve()
    for request in requests[1:]:
        with pytest.raises(EngineClosedError):
            await request


@pytest.mark.parametrize("failing", ["copy_out", "collect"])
async def test_requests_at_their_limit_fail_too_when_their_launch_fails_late(
    root: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, prefix_cache_least=1) as engine:
        runner = engine.parts.runner
        assert isinstance(runner, Runner)
        fail_at_call(monkeypatch, 2, runner.slots if failing == "copy_out" else runner, failing)
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(
                *(engine.generate([n], SamplingParams(max_tokens=2)) for n in range(4)), return_exceptions=True
            )
        assert all("device failure" in str(outcome) for outcome in outcomes)
        assert engine.stats().running == engine.stats().queued == 0
        completion = await engine.generate([1, 2], SamplingParams(max_tokens=9))
    assert_faithful(tiny, [1, 2], completion)


async def test_requests_wait_for_a_smaller_cache_when_a_forward_has_no_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = TinyModel(root=root)
    prompts = some_prompts(8, 20, 60, seed=4)
    async with embedded(tiny, is_captured=True, steps_ahead=2, kv_memory_mb=10) as engine:
        runner, batch = engine.parts.runner, engine.parts.scheduler.batch
        assert isinstance(runner, PackedRunner)
        assert isinstance(batch, PagedBatch)
        capacity, generation, run, calls = batch.pool.capacity, runner.cache.generation, runner.run, count(1)

        def out_of_memory(*args: Any) -> None:
            number = next(calls)
            if number == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if number == 12:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            run(*args)

        monkeypatch.setattr(runner, "run", out_of_memory)
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=40)) for p in prompts))
        assert engine.stats().cache_shrinks == 2
        assert batch.pool.capacity == batch.pool.limit == len(runner.cache.layers[0])
        assert batch.pool.capacity <= capacity // 4 + 1
        assert runner.cache.generation > generation, "captured steps are not used with other memory"
        assert "inference.kv_memory_mb" in caplog.text
        assert engine.stats().running == engine.stats().queued == 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


async def test_a_request_that_has_no_memory_with_the_smallest_cache_fails_with_advice(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=True, kv_memory_mb=10) as engine:
        runner = engine.parts.runner
        with monkeypatch.context() as patch:

            def out_of_memory(*_: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

            patch.setattr(runner, "run", out_of_memory)
            async with asyncio.timeout(10):
                outcome = await asyncio.gather(
                    *(engine.generate([n, 2], SamplingParams(max_tokens=5)) for n in range(3)), return_exceptions=True
                )
        assert all(isinstance(error, GenerationError) for error in outcome)
        assert all("2.00 GiB. Lower inference.kv_memory_mb" in str(error) for error in outcome)
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
    assert_faithful(tiny, [1, 2, 3], completion)


async def test_a_cache_that_cannot_be_allocated_again_is_allocated_for_later_requests(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    prompts = some_prompts(6, 20, 60, seed=5)
    async with embedded(tiny, is_captured=True, kv_memory_mb=10) as engine:
        runner, empty = engine.parts.runner, torch.empty
        assert isinstance(runner, PackedRunner)
        with monkeypatch.context() as patch:

            def no_blocks(*size: Any, **options: Any) -> torch.Tensor:
                if len(size) == 5 and size[0]:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return empty(*size, **options)

            fail_at_call(patch, 1, runner, "run", torch.OutOfMemoryError("CUDA out of memory"))
            patch.setattr(torch, "empty", no_blocks)
            async with asyncio.timeout(20):
                for prompt in prompts[:3]:
                    with pytest.raises(GenerationError, match="out of memory"):
                        await engine.generate(prompt, SamplingParams(max_tokens=9))
        async with asyncio.timeout(20):
            completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=60)) for p in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_faithful(tiny, prompt, completion)


async def test_no_token_is_sampled_with_weights_that_were_replaced_in_part(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    greedy = SamplingParams(max_tokens=100, temperature=0.0)
    async with embedded(tiny, is_captured=True, kv_memory_mb=10) as engine:
        expected = await engine.generate([1, 2, 3], greedy)
        apply, shrink = engine.parts.weights.apply, engine.parts.scheduler.batch.shrink

        def out_of_memory(plan: LoadPlan) -> None:
            for source, target in list(zip(plan.sources, plan.targets, strict=True))[::2]:
                target.copy_(source)
            out_of_memory_always()

        monkeypatch.setattr(engine.parts.weights, "apply", out_of_memory)
        monkeypatch.setattr(engine.parts.scheduler.batch, "shrink", lambda: False)
        running = engine.submit([1, 2, 3], greedy)
        await until(lambda: engine.stats().running == 1)
        with pytest.raises(WeightsError, match="no memory to apply the new weights"):
            await engine.load_weights(*tiny.weights(2))
        with pytest.raises(UnpublishedError, match="were replaced in part"):
            await running
        with pytest.raises(UnpublishedError, match="were replaced in part"):
            await engine.generate([1, 2, 3], greedy)
        monkeypatch.setattr(engine.parts.weights, "apply", apply)
        monkeypatch.setattr(engine.parts.scheduler.batch, "shrink", shrink)
        await engine.load_weights(*tiny.weights(1))
        again = await engine.generate([1, 2, 3], greedy)
        assert again.token_ids.tolist() == expected.token_ids.tolist()


async def test_an_update_without_memory_takes_it_from_the_cache_while_requests_wait(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=True, kv_memory_mb=10) as engine:
        plan, calls = engine.parts.weights.plan, count(1)

        def out_of_memory(tensors: Mapping[str, TensorSource]) -> LoadPlan:
            if next(calls) < 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return plan(tensors)

        monkeypatch.setattr(engine.parts.weights, "plan", out_of_memory)
        running = engine.submit([1, 2, 3], SamplingParams(max_tokens=60))
        await engine.load_weights(*tiny.weights(2))
        assert engine.stats().cache_shrinks == 2
        assert len((await running).token_ids) == 60
        monkeypatch.setattr(engine.parts.scheduler.batch, "shrink", lambda: False)
        monkeypatch.setattr(engine.parts.weights, "plan", lambda _: out_of_memory_always())
        with pytest.raises(
            WeightsError, match=r"no memory for the new weights on cpu: .* Lower inference\.kv_memory_mb"
        ):
            await engine.load_weights(*tiny.weights(3))


async def test_an_update_that_has_no_memory_while_it_is_applied_takes_it_from_the_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(root=root)
    async with embedded(tiny, is_captured=True, kv_memory_mb=10) as engine:
        apply, calls = engine.parts.weights.apply, count(1)

        def out_of_memory(plan: LoadPlan) -> None:
            if next(calls) < 3:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            apply(plan)

        monkeypatch.setattr(engine.parts.weights, "apply", out_of_memory)
        publication, path = tiny.weights(2)
        await engine.load_weights(publication, path)
        assert engine.stats().cache_shrinks == 2
        assert await engine.weights_digest() == publication.digest
        monkeypatch.setattr(engine.parts.scheduler.batch, "shrink", lambda: False)
        monkeypatch.setattr(engine.parts.weights, "apply", lambda _: out_of_memory_always())
        newer, path = tiny.weights(3)
        with pytest.raises(WeightsError, match=r"no memory to apply the new weights on cpu: .*2\.00 GiB"):
            await engine.load_weights(newer, path)
        monkeypatch.setattr(engine.parts.weights, "apply", apply)
        # Some of the weights may have been replaced: the publication before is loaded again too.
        await engine.load_weights(*tiny.weights(2))
        assert await engine.weights_digest() == publication.digest


async def test_an_engine_without_memory_to_capture_its_steps_starts_with_a_smaller_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, warm_up, calls = TinyModel(root=root), PackedRunner.warm_up, count(1)

    def out_of_memory(runner: PackedRunner) -> None:
        if next(calls) == 1:
            out_of_memory_always()
        warm_up(runner)

    monkeypatch.setattr(PackedRunner, "warm_up", out_of_memory)
    async with embedded(tiny, is_captured=True, kv_memory_mb=10) as engine:
        assert engine.stats().cache_shrinks == 1
        completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
    assert_faithful(tiny, [1, 2, 3], completion)
    monkeypatch.setattr(PackedRunner, "warm_up", lambda _: out_of_memory_always())
    with pytest.raises(RunError, match=r"no memory for its steps on cpu: .* Lower inference\.kv_memory_mb"):
        async with embedded(tiny, is_captured=True, kv_memory_mb=10):
            raise AssertionError("the engine must not open")


async def test_a_model_that_does_not_fit_is_not_reported_as_a_missing_device(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: out_of_memory_always())
    with pytest.raises(torch.OutOfMemoryError):
        async with embedded(TinyModel(root=root)):
            raise AssertionError("the engine must not open")


def out_of_memory_always() -> LoadPlan:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_an_update_without_memory_for_a_second_copy_is_applied_in_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(torch.bfloat16)
    weights = LiveWeights(module, torch.device("cpu"))

    class FullDevice(Upload):
        def __call__(self, tensors: Sequence[RawTensor]) -> dict[str, torch.Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(weights, "_upload", FullDevice(torch.device("cpu")))
    new = {name: torch.randn_like(tensor, dtype=torch.float32) for name, tensor in module.state_dict().items()}
    weights.apply(weights.plan(new))
    assert "applied in pieces" in caplog.text
    assert all(torch.equal(tensor, new[name].bfloat16()) for name, tensor in module.state_dict().items())
