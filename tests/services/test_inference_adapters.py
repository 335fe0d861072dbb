"""Adapters over HTTP: loaded by name as in vLLM, published by a trainer, requested by name."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from safetensors.torch import load_file

from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.policy import Publication, SamplingParams
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.routes.responses import Handler
from rollbook.inference.vllm.adapters import VllmAdapterProtocol
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.lora import CONFIG_FILE
from rollbook.inference.weights.transport import TransportOptions, open_transport
from tests.parts.inference.adapters import make_adapter, peft_model, published_adapter
from tests.parts.inference.engines import TinyModel, engine_config, until
from tests.parts.inference.models import build_model, plain_logprobs
from tests.services.test_inference_server import Served, served, update_body

TOKEN = "a-token-of-at-least-sixteen-characters"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("adapters-served"))


@pytest.fixture(scope="module")
def adapters(tiny: TinyModel) -> list[Path]:
    return [make_adapter(tiny.root / f"adapter-{seed}", tiny.model_dir, seed=seed) for seed in (1, 2)]


async def post_adapter(server: Served, verb: str, **body: Any) -> tuple[int, str]:
    async with server.session.post(f"{server.url}/v1/{verb}_lora_adapter", json=body) as response:
        return response.status, await response.text()


async def test_adapters_are_loaded_requested_and_unloaded_by_name(tiny: TinyModel, adapters: list[Path]) -> None:
    async with served(tiny, "transformers", published=None) as server:
        for name, path in zip(("one", "two"), adapters, strict=True):
            assert (await post_adapter(server, "load", lora_name=name, lora_path=str(path))) == (
                200,
                f"Success: LoRA adapter '{name}' added successfully.",
            )
        _, listed = await server.get("/v1/models")
        cards = [(card["id"], card["parent"]) for card in listed["data"]]
        assert cards == [("policy", None), ("one", "policy"), ("two", "policy")]
        assert (await server.get("/weight_info"))[1]["adapter"] is None, "the policy is the base"
        modules = [peft_model(tiny.model_dir, path) for path in adapters]
        for name, module in zip(("one", "two", "policy"), [*modules, build_model("llama", seed=0)], strict=True):
            request = {"model": name, "prompt": [1, 2], "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
            status, reply = await server.post("/v1/completions", request)
            assert (status, reply["model"]) == (200, name)
            choice = reply["choices"][0]
            expected = plain_logprobs(module, [1, 2, *choice["token_ids"]], 2)
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
            echoed = {**request, "prompt": [1, 2, *choice["token_ids"]], "max_tokens": 0, "echo": True}
            _, scored = await server.post("/v1/completions", echoed)
            assert scored["choices"][0]["logprobs"]["token_logprobs"][2:] == pytest.approx(expected, abs=1e-4)

        assert (await post_adapter(server, "unload", lora_name="one")) == (
            200,
            "Success: LoRA adapter 'one' removed successfully.",
        )
        status, reply = await server.post("/v1/completions", {**request, "model": "one"})
        assert (status, reply["error"]["param"]) == (404, "model")
        assert "policy, two" in reply["error"]["message"], "the error lists the available models"
        _, check = await server.post("/weight_checker")
        assert check["digest"] == check["published"], "the policy did not change"


async def test_invalid_adapter_requests_get_the_same_errors_as_from_vllm(tiny: TinyModel, adapters: list[Path]) -> None:
    async with served(tiny, "transformers", published=None) as server:
        path = str(adapters[0])
        assert (await post_adapter(server, "load", lora_name="one", lora_path=path))[0] == 200
        for verb, body, status, kind, words in (
            ("load", {"lora_name": "", "lora_path": path}, 400, "InvalidUserInput", "must be provided"),
            ("load", {"lora_name": "one", "lora_path": path}, 400, "InvalidUserInput", "has already been loaded"),
            ("load", {"lora_name": "policy", "lora_path": path}, 400, "InvalidUserInput", "conflicts with a served"),
            ("load", {"lora_name": "x", "lora_path": "/none"}, 404, "NotFoundError", "No adapter found for /none"),
            ("unload", {"lora_name": "x"}, 404, "NotFoundError", "The lora adapter 'x' cannot be found."),
            ("unload", {"lora_name": ""}, 400, "InvalidUserInput", "needs to be provided"),
        ):
            found, text = await post_adapter(server, verb, **body)
            assert (found, kind in text, words in text) == (status, True, True), text
        assert (await post_adapter(server, "load", lora_name="one", lora_path=path, load_inplace=True))[0] == 200


async def test_adapters_are_loaded_next_to_a_published_adapter_but_not_next_to_whole_weights(
    tiny: TinyModel, adapters: list[Path]
) -> None:
    async with served(tiny, "transformers", published=1) as server:
        status, text = await post_adapter(server, "load", lora_name="one", lora_path=str(adapters[0]))
        assert (status, "publishes whole weights" in text) == (409, True)
        offered, path, adapter = published_adapter(adapters[0], 2)
        info = {"name": adapter.name, "settings": dict(adapter.settings)}
        body = update_body(tiny, 1, publication=2, step=2, digest=offered.digest, path=str(path), adapter=info)
        assert (await server.post("/update_weights", body))[0] == 200
        assert (await server.get("/weight_info"))[1]["adapter"] == "policy-v2"
        assert (await post_adapter(server, "unload", lora_name="policy-v2"))[0] == 409
        assert (await post_adapter(server, "load", lora_name="one", lora_path=str(adapters[1])))[0] == 200
        _, listed = await server.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["policy", "policy-v2", "base", "one"]
        _, check = await server.post("/weight_checker")
        assert (check["digest"], check["published"]) == (offered.digest, offered.digest)
        replies = {}
        for name in ("policy", "policy-v2", "base", "one"):
            request = {"model": name, "prompt": [1, 2], "max_tokens": 16, "seed": 1, "return_token_ids": True}
            replies[name] = (await server.post("/v1/completions", request))[1]["choices"][0]["token_ids"]
        assert replies["policy"] == replies["policy-v2"]
        assert len({tuple(tokens) for tokens in replies.values()}) == 3


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Two replicas, the trainer's client, and a switch that makes the second replica unreachable."""

    client: WeightTransferClient
    engines: list[Engine]
    is_cut: list[bool]

    async def push(self, directory: Path, number: int, *, epoch: int = 1) -> tuple[Publication, str]:
        offered, path, adapter = published_adapter(directory, number, epoch=epoch)
        location = await self.client.put(offered, load_file(path), adapter=adapter)
        await self.client.receive(offered, location)
        return offered, location

    @property
    def live(self) -> list[str | None]:
        return [None if engine.adapter is None else engine.adapter.name for engine in self.engines]


@asynccontextmanager
async def two_replicas(
    tiny: TinyModel, tmp_path: Path, transport: str = "directory", **settings: Any
) -> AsyncIterator[Replicas]:
    is_cut = [False]
    async with AsyncExitStack() as stack:
        engines, urls = [], []
        for number in range(2):

            @web.middleware
            async def maybe_unreachable(
                request: web.Request, handler: Handler, number: int = number
            ) -> web.StreamResponse:
                if is_cut[0] and number == 1:
                    return web.Response(status=502)
                return await handler(request)

            engine = await stack.enter_async_context(tiny.engine("transformers", published=None))
            app = build_app(engine, engine_config("transformers"), steering_token=TOKEN)
            app.middlewares.append(maybe_unreachable)
            engines.append(engine)
            urls.append(await stack.enter_async_context(serve(app)))
        options = TransportOptions(directory=str(tmp_path / "weights"), token=TOKEN)
        defaults = {"request_s": 30, "transport": open_transport(transport, options), "api_key": TOKEN}
        client = await stack.enter_async_context(WeightTransferClient(urls, **{**defaults, **settings}))
        yield Replicas(client=client, engines=engines, is_cut=is_cut)


@pytest.mark.parametrize("transport", ["directory", "shared_memory", "pull"])
async def test_a_published_adapter_is_live_everywhere_and_its_digest_is_checked(
    tiny: TinyModel, adapters: list[Path], tmp_path: Path, transport: str
) -> None:
    async with two_replicas(tiny, tmp_path, transport) as replicas:
        for number, directory in enumerate(adapters, start=1):
            offered, location = await replicas.push(directory, number)
            assert replicas.live == [f"policy-v{number}"] * 2
            assert list(await replicas.client.reported()) == [offered] * 2
            assert [await engine.weights_digest() for engine in replicas.engines] == [offered.digest] * 2
            # The folder is an adapter directory that PEFT can read.
            assert (Path(location).parent / CONFIG_FILE).is_file()
            completion = await replicas.engines[0].generate([1, 2], SamplingParams(max_tokens=6))
            theirs = peft_model(tiny.model_dir, Path(location).parent)
            expected = plain_logprobs(theirs, [1, 2, *completion.token_ids.tolist()], 2)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def test_an_adapter_of_an_old_epoch_is_refused_and_one_of_another_model_stops_the_trainer(
    tiny: TinyModel, adapters: list[Path], tmp_path: Path
) -> None:
    async with two_replicas(tiny, tmp_path) as replicas:
        newest, _ = await replicas.push(adapters[0], 3, epoch=2)
        with pytest.raises(FencedError):
            await replicas.push(adapters[1], 4, epoch=1)
        assert list(await replicas.client.reported()) == [newest] * 2
        foreign = make_adapter(tmp_path / "gpt2", TinyModel(root=tmp_path, kind="gpt2").model_dir)
        with pytest.raises(RunError, match="does not have"):
            await replicas.push(foreign, 5, epoch=2)


async def test_a_replica_that_missed_an_adapter_is_quarantined_and_updated_later(
    tiny: TinyModel, adapters: list[Path], tmp_path: Path
) -> None:
    async with two_replicas(tiny, tmp_path, confirm_s=2.0) as replicas:
        await replicas.push(adapters[0], 1)
        replicas.is_cut[0] = True
        second, location = await replicas.push(adapters[1], 2)
        assert replicas.client.quarantined
        assert replicas.live == ["policy-v2", "policy-v1"]
        replicas.is_cut[0] = False
        await replicas.client.reported()
        await replicas.client.receive(second, location)
        assert replicas.live == ["policy-v2", "policy-v2"]


async def test_adapters_are_replaced_in_flight_and_each_token_is_stamped(
    tiny: TinyModel, adapters: list[Path], tmp_path: Path
) -> None:
    async with two_replicas(tiny, tmp_path) as replicas:
        await replicas.push(adapters[0], 1)
        numbers = itertools.count(2)
        versions: set[int] = set()
        async with asyncio.timeout(60):
            while len(versions) < 2:
                number = next(numbers)
                running = replicas.engines[0].submit([1, 2, 3], SamplingParams(max_tokens=200))
                await until(lambda: replicas.engines[0].stats().running > 0)
                await replicas.push(adapters[number % 2], number)
                versions = set((await running).versions.tolist())
                assert versions <= {number - 1, number}


async def test_a_client_that_requests_by_name_uses_the_newest_adapter_and_stamps_its_tokens(
    tiny: TinyModel, adapters: list[Path]
) -> None:
    """vLLM's protocol at our own server, which lists adapters and serves their names as vLLM does."""
    async with (
        served(tiny, "transformers", published=None) as server,
        open_policy_client(server.url, request_s=20, protocol=VllmAdapterProtocol(model_name="policy")) as client,
    ):
        waiting = asyncio.create_task(client.complete([1, 2], SamplingParams(max_tokens=3)))
        for number, directory in ((4, adapters[0]), (5, adapters[1]), (6, adapters[0])):
            offered, path, adapter = published_adapter(directory, number)
            await server.engine.load_weights(offered, path, adapter=adapter)
            # The previous name is gone: the client gets an error and looks up the new name.
            completion = await client.complete([1, 2], SamplingParams(max_tokens=3), min_publication=number - 1)
            assert set(completion.versions.tolist()) == {number}
        assert set((await waiting).versions.tolist()) <= {4, 5, 6}
        with pytest.raises(TransientError, match="required is 7 or newer"):
            await client.complete([1], SamplingParams(max_tokens=1), min_publication=7, timeout_s=0.5)
