"""What every policy server promises its clients and its trainer: ours, and vLLM (the latter in `make test-vllm` only)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollbook.contracts.adapter import AdapterKind
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import Completion, FinishReason, Publication, SamplingParams
from rollbook.inference.client.client import PolicyClient, open_policy_client
from rollbook.inference.client.server_protocol import RollbookProtocol, ServerProtocol
from rollbook.inference.client.vllm import VllmProtocol, VllmServerApi
from rollbook.inference.client.vllm_adapters import VllmAdapterProtocol, VllmAdapterServerApi, adapters_in_use
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.server_api import RollbookServerApi, WeightServerApi
from rollbook.inference.weights.transport import TransportOptions, open_transport
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.model.policy_model import PolicyModel
from tests.parts.inference.chat_model import chat_model
from tests.parts.inference.models import plain_logprobs, publication
from tests.parts.inference.vllm import vllm_server, why_not

VLLM_URLS = {
    "vllm-reload": "vllm_untied_url",
    "vllm-plugin": "vllm_tied_url",
    "vllm-adapter": "vllm_adapter_url",
}
REQUEST_S = 400.0
"""The first request to a vLLM on a busy CPU compiles for minutes."""
KINDS = ["own", "own-adapter", "vllm-reload", "vllm-plugin", "vllm-adapter"]


@dataclass
class Models:
    """Models that differ in their weights only. Publications are numbered through: a server lives for several tests."""

    root: Path
    is_tied: bool
    number: int = 0
    loaded: dict[int, PolicyModel] = field(default_factory=dict)

    def directory(self, seed: int) -> Path:
        return chat_model(self.root / f"seed-{seed}", seed=seed, is_tied=self.is_tied)

    def next(self) -> tuple[Publication, PolicyModel]:
        self.number += 1
        model = PolicyModel.load(self.directory(1 + self.number % 3))
        self.loaded[self.number] = model
        return publication(self.number, model.digest()), model

    def next_adapter(self) -> tuple[Publication, PolicyModel, AdapterKind]:
        """Beside the base that every server was started with."""
        self.number += 1
        model = PolicyModel.load(self.directory(1), TrainerConfig(lora=LoraSettings(rank=4, alpha=8)))
        kind = model.publish_adapters()
        torch.manual_seed(self.number)
        with torch.no_grad():
            for half in model.weights().values():
                half.normal_(0.0, 0.2)
        self.loaded[self.number] = model
        return publication(self.number, model.digest()), model, kind


@dataclass(frozen=True, kw_only=True)
class Rig:
    client: PolicyClient
    weights: WeightTransferClient
    models: Models
    has_adapters: bool = False
    keeps_weights: bool = False
    """Whether a request keeps the weights that it began with."""

    async def publish(self) -> Publication:
        if self.has_adapters:
            offered, model, kind = self.models.next_adapter()
            adapter = kind.published(offered.id)
            await self.weights.receive(offered, await self.weights.put(offered, model.weights(), adapter=adapter))
            return offered
        offered, model = self.models.next()
        await self.weights.receive(offered, await self.weights.put(offered, model.weights()))
        return offered

    def deviation(self, prompt: list[int], completion: Completion, version: int) -> float:
        """The largest difference between its logprobs and those of a plain forward of the published model."""
        tokens = [*prompt, *completion.token_ids.tolist()]
        expected = plain_logprobs(self.models.loaded[version].module, tokens, len(prompt))
        return float(np.abs(np.array(expected) - completion.logprobs).max())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("untied"), is_tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture(scope="module")
def vllm_untied_url(untied: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(untied.directory(1), tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield url


@pytest.fixture(scope="module")
def vllm_tied_url(tied: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(tied.directory(1), tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield url


@pytest.fixture(scope="module")
def vllm_adapter_url(tied: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(tied.directory(1), tmp_path_factory.mktemp("vllm") / "vllm.log", has_adapters=True) as url:
        yield url


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name.startswith("vllm") and (reason := why_not()) is not None:
        pytest.skip(reason)
    return name


@pytest_asyncio.fixture
async def rig(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    # On a CPU, reloading a directory leaves vLLM's copy of a tied output embedding as it was; our plug-in renews it.
    models: Models = request.getfixturevalue("untied" if kind == "vllm-reload" else "tied")
    async with AsyncExitStack() as stack:
        protocol: ServerProtocol = RollbookProtocol()
        server_api: WeightServerApi = RollbookServerApi()
        if kind.startswith("own"):
            config = InferenceConfig(max_model_len=512, max_running=32)
            engine = await stack.enter_async_context(open_engine(config, models.directory(1)))
            url = await stack.enter_async_context(serve(build_app(engine, config)))
        else:
            url = request.getfixturevalue(VLLM_URLS[kind])
            protocol = VllmProtocol(model_name="policy")
            server_api = VllmServerApi("reload" if kind == "vllm-reload" else "plugin")
            if kind == "vllm-adapter":
                protocol, server_api = VllmAdapterProtocol(model_name="policy"), VllmAdapterServerApi()
        client = await stack.enter_async_context(open_policy_client(url, request_s=REQUEST_S, protocol=protocol))
        transport = open_transport("directory", TransportOptions(directory=str(tmp_path / "weights")))
        weights = await stack.enter_async_context(
            WeightTransferClient([url], request_s=REQUEST_S, transport=transport, server_api=server_api)
        )
        yield Rig(
            client=client,
            weights=weights,
            models=models,
            has_adapters=kind.endswith("adapter"),
            keeps_weights=kind == "vllm-adapter",
        )


async def test_a_completion_has_ids_exact_logprobs_and_the_version_that_was_published(rig: Rig) -> None:
    published = await rig.publish()
    completion = await rig.client.complete([10, 20, 30], SamplingParams(max_tokens=24))
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 24
    assert set(completion.versions.tolist()) == {published.id}
    assert rig.deviation([10, 20, 30], completion, published.id) < 1e-3


async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(rig: Rig) -> None:
    await rig.publish()
    narrow = await rig.client.complete([10, 20], SamplingParams(max_tokens=12, top_k=1, temperature=0.7))
    assert np.abs(narrow.logprobs).max() < 1e-5
    greedy = await rig.client.complete([10, 20], SamplingParams(max_tokens=12, temperature=0.0))
    assert greedy.token_ids.tolist() == narrow.token_ids.tolist()


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(rig: Rig) -> None:
    await rig.publish()
    free = await rig.client.complete([5, 6], SamplingParams(max_tokens=20, temperature=0.0))
    stop = int(free.token_ids[4])
    at = free.token_ids.tolist().index(stop)
    stopped = await rig.client.complete([5, 6], SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids.tolist() == free.token_ids[: at + 1].tolist()


async def test_the_end_of_a_turn_is_the_callers_choice_alone(rig: Rig) -> None:
    """The model's own end token does not stop a request that did not ask for it."""
    await rig.publish()
    answers = await asyncio.gather(*(rig.client.complete([n], SamplingParams(max_tokens=60)) for n in range(12)))
    assert {len(answer.token_ids) for answer in answers} == {60}


async def test_a_seed_repeats_the_tokens_whatever_runs_beside_it(rig: Rig) -> None:
    await rig.publish()
    seeded = SamplingParams(max_tokens=20, seed=7)
    alone = await rig.client.complete([3, 4], seeded)
    noise = [rig.client.complete([n], SamplingParams(max_tokens=20)) for n in range(20)]
    crowded, *_ = await asyncio.gather(rig.client.complete([3, 4], seeded), *noise)
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()


async def test_a_prompt_that_can_never_be_answered_is_refused_and_nobody_else_is_harmed(rig: Rig) -> None:
    await rig.publish()
    outcomes = await asyncio.gather(
        rig.client.complete([1, 99_999], SamplingParams(max_tokens=2)),
        rig.client.complete([1] * 600, SamplingParams(max_tokens=2)),
        rig.client.complete([1], SamplingParams(max_tokens=2)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [EpisodeError, EpisodeError, Completion]


async def test_pause_keep_holds_running_requests_and_resume_lets_them_finish(rig: Rig) -> None:
    await rig.publish()
    running = asyncio.create_task(rig.client.complete([1, 2], SamplingParams(max_tokens=400)))
    await asyncio.sleep(0.1)
    await rig.weights.pause("keep")
    newcomer = asyncio.create_task(rig.client.complete([3], SamplingParams(max_tokens=4)))
    await asyncio.sleep(0.5)
    was_done = newcomer.done()
    await rig.weights.resume()
    assert not was_done
    assert len((await running).token_ids) == 400
    assert len((await newcomer).token_ids) == 4


async def test_weights_that_arrive_in_flight_are_seen_in_the_version_spans(rig: Rig) -> None:
    first = await rig.publish()
    for _ in range(12):
        running = asyncio.create_task(rig.client.complete([1, 2, 3], SamplingParams(max_tokens=450)))
        await asyncio.sleep(0.05)
        second = await rig.publish()
        completion = await running
        assert len(completion.token_ids) == 450
        assert (np.diff(completion.versions) >= 0).all()
        if rig.keeps_weights:
            # An adapter is chosen by its name when a request begins; the next one asks for the newest.
            assert set(completion.versions.tolist()) == {first.id}
            assert rig.deviation([1, 2, 3], completion, first.id) < 1e-3
            after = await rig.client.complete([1, 2, 3], SamplingParams(max_tokens=4), min_publication=second.id)
            assert set(after.versions.tolist()) == {second.id}
            return
        if set(completion.versions.tolist()) == {first.id, second.id}:
            return
        first = second
    raise AssertionError("no update ever arrived while a request was running")


async def test_a_request_waits_for_the_weights_it_needs(rig: Rig) -> None:
    published = await rig.publish()
    waiting = asyncio.create_task(
        rig.client.complete([1], SamplingParams(max_tokens=12), min_publication=published.id + 1)
    )
    await rig.client.complete([2], SamplingParams(max_tokens=2), min_publication=published.id)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    newer = await rig.publish()
    assert set((await waiting).versions.tolist()) == {newer.id}


async def test_the_trainer_hears_which_publication_is_in_use(rig: Rig) -> None:
    published = await rig.publish()
    (told,) = await rig.weights.reported()
    assert told is not None
    assert told.id == published.id


async def test_adapters_that_nobody_uses_are_unloaded_but_for_the_newest(rig: Rig) -> None:
    """Our own engine has one at a time. vLLM has as many as were loaded: the old ones go, once no request needs them."""
    published = [await rig.publish() for _ in range(4)]
    if not rig.keeps_weights:
        assert [told and told.id for told in await rig.weights.reported()] == [published[-1].id]
        return
    (connection,) = [replica.connection for replica in rig.client.fleet.replicas]
    listed = await connection.get_text("/v1/models")
    assert [f'"policy-v{p.id}"' in listed for p in published] == [False, False, True, True]


def test_adapters_in_use_are_those_of_the_newest_line() -> None:
    metrics = (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="policy-v1",waiting_lora_adapters="policy-v3"} 20.5\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="policy-v9",waiting_lora_adapters=""} 10.5\n'
    )
    assert adapters_in_use(metrics) == {"policy-v1", "policy-v3"}
    assert adapters_in_use("nothing of the kind") == set()
