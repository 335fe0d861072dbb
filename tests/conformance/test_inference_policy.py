"""The contract of a policy server with its clients and its trainer: Rollbook's server, and vLLM (in `make test-vllm` only)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from yarl import URL

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.policy import Completion, FinishReason, Publication, SamplingParams
from rollbook.contracts.weights import AdapterKind
from rollbook.inference.client.client import PolicyClient, open_policy_client
from rollbook.inference.client.server_protocol import RollbookProtocol, ServerProtocol
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.sglang.client import SglangProtocol, SglangServerApi
from rollbook.inference.vllm.adapters import VllmAdapterProtocol, VllmAdapterServerApi, adapters_in_use
from rollbook.inference.vllm.client import VllmProtocol, VllmServerApi
from rollbook.inference.vllm.guard import OPEN_PATHS
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.server_api import RollbookServerApi, WeightServerApi
from rollbook.inference.weights.transport import TransportOptions, open_transport
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.model.policy_model import PolicyModel
from tests.parts.inference.chat_model import chat_model
from tests.parts.inference.models import plain_logprobs, publication
from tests.parts.inference.sglang import serve_stand_in
from tests.parts.inference.vllm import vllm_server, why_not

VLLM_URLS = {
    "vllm-reload": "vllm_untied_url",
    "vllm-plugin": "vllm_tied_url",
    "vllm-adapter": "vllm_adapter_url",
}
REQUEST_S = 400.0
"""vLLM on a busy CPU compiles for minutes at the first request."""
KINDS = ["own", "own-adapter", "sglang", "vllm-reload", "vllm-plugin", "vllm-adapter"]


@dataclass
class Models:
    """Models that differ in their weights only. A server is used by several tests, so publications are numbered across them."""

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
        """An adapter of the base model that every server starts with."""
        self.number += 1
        model = PolicyModel.load(self.directory(1), TrainerConfig(lora=LoraSettings(rank=4, alpha=8)))
        kind = model.publish_adapters()
        torch.manual_seed(self.number)
        with torch.no_grad():
            for matrix in model.weights().values():
                matrix.normal_(0.0, 0.2)
        self.loaded[self.number] = model
        return publication(self.number, model.digest()), model, kind


@dataclass(frozen=True, kw_only=True)
class Rig:
    client: PolicyClient
    weights: WeightTransferClient
    models: Models
    has_adapters: bool = False
    keeps_weights: bool = False
    """Whether a request keeps the weights that it started with."""

    async def publish(self) -> Publication:
        published, location = await self.put()
        await self.weights.receive(published, location)
        return published

    async def put(self) -> tuple[Publication, str]:
        """Makes a model and stores its weights where the server can receive them."""
        if self.has_adapters:
            published, model, kind = self.models.next_adapter()
            return published, await self.weights.put(published, model.weights(), adapter=kind.published(published.id))
        published, model = self.models.next()
        return published, await self.weights.put(published, model.weights())

    async def wait_for_load(self, count: int) -> None:
        """Wait until the server has this many requests, running or queued."""
        async with asyncio.timeout(REQUEST_S):
            while await self.load() != count:
                pass

    async def request_in_progress(self, prompt: list[int], max_tokens: int) -> asyncio.Task[Completion]:
        """A request that the server has started. One that ended before its load was seen is replaced."""
        async with asyncio.timeout(REQUEST_S):
            while True:
                running = asyncio.create_task(self.client.complete(prompt, SamplingParams(max_tokens=max_tokens)))
                while not running.done():
                    if await self.load() == 1:
                        return running

    async def held_request(self, prompt: list[int], max_tokens: int) -> asyncio.Task[Completion]:
        """A request that a pause holds."""
        while True:
            running = await self.request_in_progress(prompt, max_tokens)
            await self.weights.pause("keep")
            if await self.load() == 1:
                return running
            await self.weights.resume()
            await running

    async def load(self) -> int:
        (replica,) = self.client.fleet.replicas
        return (await self.client.fleet.protocol.status(replica.connection)).load

    def deviation(self, prompt: list[int], completion: Completion, version: int) -> float:
        """The largest difference to the logprobs of a plain forward of the published model."""
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
def vllm_untied_url(untied: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with vllm_server(untied.directory(1), tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server


@pytest.fixture(scope="module")
def vllm_tied_url(tied: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with vllm_server(tied.directory(1), tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server


@pytest.fixture(scope="module")
def vllm_adapter_url(tied: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with vllm_server(tied.directory(1), tmp_path_factory.mktemp("vllm") / "vllm.log", has_adapters=True) as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name.startswith("vllm") and (reason := why_not()) is not None:
        pytest.skip(reason)
    return name


@pytest_asyncio.fixture
async def rig(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    # On a CPU, reloading a directory does not update vLLM's copy of a tied output embedding; the plug-in updates it.
    models: Models = request.getfixturevalue("untied" if kind == "vllm-reload" else "tied")
    async with AsyncExitStack() as stack:
        protocol: ServerProtocol = RollbookProtocol()
        server_api: WeightServerApi = RollbookServerApi()
        token = None
        if kind.startswith("own"):
            config = InferenceConfig(max_model_len=512, max_running=32)
            engine = await stack.enter_async_context(open_engine(config, models.directory(1)))
            url = await stack.enter_async_context(serve(build_app(engine, config)))
        elif kind == "sglang":
            config = InferenceConfig(max_model_len=512, max_running=32)
            engine = await stack.enter_async_context(open_engine(config, models.directory(1)))
            url = await stack.enter_async_context(serve_stand_in(engine))
            protocol, server_api = SglangProtocol(), SglangServerApi()
        else:
            url, token = request.getfixturevalue(VLLM_URLS[kind])
            protocol = VllmProtocol(model_name="policy")
            server_api = VllmServerApi("reload" if kind == "vllm-reload" else "plugin")
            if kind == "vllm-adapter":
                protocol, server_api = VllmAdapterProtocol(model_name="policy"), VllmAdapterServerApi()
        client = await stack.enter_async_context(open_policy_client(url, request_s=REQUEST_S, protocol=protocol))
        transport = open_transport("directory", TransportOptions(directory=str(tmp_path / "weights")))
        weights = await stack.enter_async_context(
            WeightTransferClient([url], request_s=REQUEST_S, transport=transport, server_api=server_api, api_key=token)
        )
        yield Rig(
            client=client,
            weights=weights,
            models=models,
            has_adapters=kind.endswith("adapter"),
            keeps_weights=kind == "vllm-adapter",
        )


async def test_a_completion_has_ids_exact_logprobs_and_the_published_version(rig: Rig) -> None:
    published = await rig.publish()
    completion = await rig.client.complete([10, 20, 30], SamplingParams(max_tokens=24))
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 24
    assert set(completion.versions.tolist()) == {published.id}
    assert rig.deviation([10, 20, 30], completion, published.id) < 1e-3


async def test_logprobs_are_those_of_the_sampling_distribution(rig: Rig) -> None:
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


async def test_only_the_caller_decides_what_ends_a_turn(rig: Rig) -> None:
    """The end token of the model does not stop a request that does not list it."""
    await rig.publish()
    completions = await asyncio.gather(*(rig.client.complete([n], SamplingParams(max_tokens=60)) for n in range(12)))
    assert {len(completion.token_ids) for completion in completions} == {60}


async def test_a_seed_repeats_the_tokens_whatever_runs_concurrently(rig: Rig) -> None:
    await rig.publish()
    seeded = SamplingParams(max_tokens=20, seed=7)
    alone = await rig.client.complete([3, 4], seeded)
    others = [rig.client.complete([n], SamplingParams(max_tokens=20)) for n in range(20)]
    concurrent, *_ = await asyncio.gather(rig.client.complete([3, 4], seeded), *others)
    assert concurrent.token_ids.tolist() == alone.token_ids.tolist()


async def test_an_invalid_prompt_is_refused_and_other_requests_are_not_affected(rig: Rig) -> None:
    await rig.publish()
    outcomes = await asyncio.gather(
        rig.client.complete([1, 99_999], SamplingParams(max_tokens=2)),
        rig.client.complete([1] * 600, SamplingParams(max_tokens=2)),
        rig.client.complete([1], SamplingParams(max_tokens=2)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [EpisodeError, EpisodeError, Completion]


async def test_pause_keep_holds_all_requests_and_resume_completes_them(rig: Rig) -> None:
    await rig.publish()
    running = await rig.held_request([1, 2], max_tokens=400)
    queued = asyncio.create_task(rig.client.complete([3], SamplingParams(max_tokens=4)))
    await rig.wait_for_load(2)
    loads = {await rig.load() for _ in range(50)}
    await rig.weights.resume()
    assert loads == {2}
    assert len((await running).token_ids) == 400
    assert len((await queued).token_ids) == 4


async def test_weights_that_arrive_during_a_request_appear_in_its_versions(rig: Rig) -> None:
    first = await rig.publish()
    for attempt in range(12):
        # Before the request starts: next to a busy engine this can take longer than the whole request.
        second, location = await rig.put()
        running = await rig.request_in_progress([1, 2, 3], max_tokens=450)
        # An update that comes too early meets a request without tokens, one that comes too late none at all.
        await asyncio.sleep(0.05 * attempt)
        await rig.weights.receive(second, location)
        completion = await running
        assert len(completion.token_ids) == 450
        assert (np.diff(completion.versions) >= 0).all()
        if rig.keeps_weights:
            # A request names its adapter when it starts; the next request names the newest one.
            assert set(completion.versions.tolist()) == {first.id}
            assert rig.deviation([1, 2, 3], completion, first.id) < 1e-3
            after = await rig.client.complete([1, 2, 3], SamplingParams(max_tokens=4), min_publication=second.id)
            assert set(after.versions.tolist()) == {second.id}
            return
        if set(completion.versions.tolist()) == {first.id, second.id}:
            return
        first = second
    raise AssertionError("no update arrived while a request was running")


async def test_a_request_waits_for_the_weights_it_needs(rig: Rig) -> None:
    published = await rig.publish()
    waiting = asyncio.create_task(
        rig.client.complete([1], SamplingParams(max_tokens=12), min_publication=published.id + 1)
    )
    await rig.client.complete([2], SamplingParams(max_tokens=2), min_publication=published.id)
    assert not waiting.done()
    newer = await rig.publish()
    assert set((await waiting).versions.tolist()) == {newer.id}


async def test_the_server_reports_its_publication(rig: Rig) -> None:
    published = await rig.publish()
    (reported,) = await rig.weights.reported()
    assert reported is not None
    assert reported.id == published.id


async def test_unused_adapters_are_unloaded_except_the_two_newest(rig: Rig) -> None:
    """Rollbook's engine has one adapter. vLLM keeps all loaded ones, so old ones must be unloaded once no request uses them."""
    published = [await rig.publish() for _ in range(4)]
    if not rig.keeps_weights:
        assert [reported and reported.id for reported in await rig.weights.reported()] == [published[-1].id]
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
    assert adapters_in_use("other metrics") == set()


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/v1/load_lora_adapter"])
async def test_a_vllm_server_that_a_run_started_is_steered_with_the_token_only(
    path: str, request: pytest.FixtureRequest
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    url, token = request.getfixturevalue("vllm_untied_url")
    async with aiohttp.ClientSession() as session:

        async def status(**headers: str) -> int:
            async with session.post(url + path, json={}, headers=headers) as response:
                return response.status

        assert await status() == 401
        assert await status(Authorization="Bearer another-token-of-this-length") == 401
        assert await status(Authorization=f"Bearer {token}", Origin="http://evil.example") == 403
        assert await status(Authorization=f"Bearer {token}") not in (401, 403)
        if path == "/pause":
            async with session.post(f"{url}/resume", headers={"Authorization": f"Bearer {token}"}) as response:
                assert response.status == 200


DISGUISES = ("/{}/", "//{}", "/./{}", "/v1/../{}", "/%2e/{}", "/v1/completions/../../{}", "/{};x=1", "/{}?a=/health")


async def test_every_route_of_a_vllm_server_but_completions_and_status_needs_the_token_however_its_path_is_written(
    request: pytest.FixtureRequest,
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    url, token = request.getfixturevalue("vllm_untied_url")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {token}"}) as response:
            routes = [
                (verb.upper(), path) for path, verbs in (await response.json())["paths"].items() for verb in verbs
            ]

        async def status(verb: str, path: str, **headers: str) -> int:
            body: dict[str, str] | None = None if verb == "GET" else {}
            async with session.request(verb, URL(url + path, encoded=True), headers=headers, json=body) as response:
                return response.status

        steering = [(verb, path) for verb, path in routes if path not in OPEN_PATHS]
        assert ("POST", "/pause") in steering
        for verb, path in steering:
            assert await status(verb, path) == 401, path
            for disguise in DISGUISES:
                assert await status(verb, disguise.format(path[1:])) in (401, 404), (verb, disguise, path)
        for verb, path in routes:
            for headers in ({"Host": "evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
                assert await status(verb, path, Authorization=f"Bearer {token}", **headers) == 403, (path, headers)
