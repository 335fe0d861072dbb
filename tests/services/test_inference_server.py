"""The policy server over loopback: completions, errors, pauses, updates, and clients that disconnect."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.wire.completions import MAX_CHOICES, MSGPACK, TokenReply
from tests.parts.inference.engines import TinyModel, engine_config, until
from tests.parts.inference.models import MAX_LEN, VOCAB, plain_logprobs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("server"))


@dataclass(frozen=True, kw_only=True)
class Served:
    engine: Engine
    session: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def served(
    tiny: TinyModel, name: str = "scripted", *, published: int | None = 1, **settings: Any
) -> AsyncIterator[Served]:
    async with (
        tiny.engine(name, published=published, **settings) as engine,
        serve(build_app(engine, engine_config(name, **settings))) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Served(engine=engine, session=session, url=url)


def update_body(tiny: TinyModel, number: int, *, epoch: int = 1, **changes: Any) -> dict[str, Any]:
    published, path = tiny.weights(number, epoch=epoch)
    info = {
        "backend": "directory",
        "path": str(path),
        "publication": published.id,
        "step": published.step,
        "epoch": published.epoch,
        "digest": published.digest,
    }
    return {"update_info": {**info, **changes}}


async def test_a_completion_has_vllms_format_and_the_logprobs_of_the_model(tiny: TinyModel) -> None:
    async with served(tiny, "transformers") as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 6, "return_token_ids": True, "logprobs": 0, "model": "policy"}
        status, reply = await server.post("/v1/completions", body)
    assert status == 200
    assert reply["object"] == "text_completion"
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    choice = reply["choices"][0]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": 6}]
    expected = plain_logprobs(tiny.model(1), [1, 2, 3, *choice["token_ids"]], 3)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


async def test_ids_and_logprobs_are_sent_only_on_request(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        _, reply = await server.post("/v1/completions", {"prompt": [1]})
    assert reply["choices"][0]["token_ids"] is None
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 16


async def test_a_client_that_accepts_msgpack_receives_the_same_tokens_as_raw_arrays(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        body = {"prompt": [[1], [2]], "max_tokens": 5, "seeds": [3, 4], "return_token_ids": True, "logprobs": 0}
        _, reply = await server.post("/v1/completions", body)
        request = server.session.post(server.url + "/v1/completions", json=body, headers={"Accept": MSGPACK})
        async with request as response:
            assert response.content_type == MSGPACK
            arrays = msgspec.msgpack.decode(await response.read(), type=TokenReply)
    for choice, array in zip(reply["choices"], arrays.completions, strict=True):
        completion = array.to_contract()
        assert completion.token_ids.tolist() == choice["token_ids"]
        assert completion.logprobs.tolist() == choice["logprobs"]["token_logprobs"]
        assert completion.versions.tolist() == [1] * 5
        assert completion.finish_reason == choice["finish_reason"]


async def test_several_prompts_are_completed_in_order_each_with_its_seed(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        body = {"prompt": [[1], [2, 3], [4]], "max_tokens": 4, "return_token_ids": True, "seeds": [5, None, 5]}
        _, reply = await server.post("/v1/completions", body)
        ids = [choice["token_ids"] for choice in reply["choices"]]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        # The tokens of the scripted engine depend on the seed only.
        assert ids[0] == ids[2] != ids[1]
        _, reply = await server.post("/v1/completions", {"prompt": [[1], [2]], "n": 3, "max_tokens": 1})
        assert len(reply["choices"]) == 6
        assert reply["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [1, VOCAB]}, "prompt"),
        ({"prompt": [1] * MAX_LEN}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "max_tokens": "many"}, "max_tokens"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "top_p": 0}, "top_p"),
        ({"prompt": [1], "top_k": -2}, "top_k"),
        ({"prompt": [1], "n": 0}, "n"),
        ({"prompt": [1], "n": MAX_CHOICES + 1}, "n"),
        ({"prompt": [[1], [2]], "seeds": [1]}, "seeds"),
        ({"prompt": [1], "logprobs": 21}, "logprobs"),
        ({"prompt": [1], "stop": ["\n"]}, "stop"),
        ({"prompt": [1], "logit_bias": {"1": 5}}, "logit_bias"),
        ({"prompt": [1], "max_tokns": 5}, "max_tokns"),
    ],
)
async def test_an_invalid_request_is_rejected_naming_the_field(
    tiny: TinyModel, body: dict[str, Any], param: str
) -> None:
    async with served(tiny) as server:
        status, reply = await server.post("/v1/completions", body)
        assert status == 400
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert reply["error"]["param"] == param
        assert param in reply["error"]["message"]
        assert reply["error"]["code"] == 400
        assert server.engine.stats().queued == 0


async def test_unsupported_fields_with_neutral_values_are_accepted(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        neutral = {"stream": False, "echo": False, "best_of": 1, "stop": None, "presence_penalty": 0, "user": "me"}
        status, _ = await server.post("/v1/completions", {"prompt": [1], "max_tokens": 1, "top_k": -1, **neutral})
        assert status == 200


async def test_invalid_json_and_unknown_paths_return_errors_in_the_same_format(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        async with server.session.post(
            server.url + "/v1/completions", data=b"{", headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == 400
        status, reply = await server.get("/nowhere")
        assert (status, reply["error"]["code"]) == (404, 404)


async def test_a_server_without_published_weights_is_healthy_and_does_not_sample(tiny: TinyModel) -> None:
    async with served(tiny, published=None) as server:
        status, health = await server.get("/health")
        assert status == 200
        assert health["publication"] is None
        assert (await server.get("/weight_info"))[1]["weight_version"] == "default"
        async with server.session.post(server.url + "/v1/completions", json={"prompt": [1]}) as response:
            assert response.status == 503
            assert 0 < float(response.headers["Retry-After"]) <= 0.2
            assert (await response.json())["error"]["type"] == "stale_weights"
        assert (await server.post("/update_weights", update_body(tiny, 1)))[0] == 200
        assert (await server.post("/v1/completions", {"prompt": [1]}))[0] == 200


async def test_a_request_for_newer_weights_is_refused_until_they_arrive(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        body = {"prompt": [1], "max_tokens": 1, "min_publication": 2}
        status, reply = await server.post("/v1/completions", body)
        assert (status, reply["error"]["type"]) == (503, "stale_weights")
        assert "2" in reply["error"]["message"]
        await server.post("/update_weights", update_body(tiny, 2))
        status, reply = await server.post("/v1/completions", body)
        assert status == 200
        assert reply["choices"][0]["weight_versions"][0]["version"] == 2


async def test_updates_are_fenced_checked_and_idempotent(tiny: TinyModel) -> None:
    async with served(tiny, published=None) as server:
        assert await server.post("/update_weights", update_body(tiny, 5, epoch=3)) == (
            200,
            {"message": "Weights updated"},
        )
        assert (await server.post("/update_weights", update_body(tiny, 5, epoch=3)))[0] == 200
        for outdated in (update_body(tiny, 6, epoch=2), update_body(tiny, 4, epoch=3)):
            status, reply = await server.post("/update_weights", outdated)
            assert (status, reply["error"]["type"]) == (409, "outdated_update")
        status, reply = await server.post("/update_weights", update_body(tiny, 6, epoch=3, digest="f" * 32))
        assert status == 400
        assert "digest" in reply["error"]["message"]
        status, reply = await server.post("/update_weights", update_body(tiny, 6, epoch=3, backend="unknown"))
        assert (status, reply["error"]["param"]) == (400, "backend")
        published, _ = tiny.weights(5, epoch=3)
        assert (await server.get("/weight_info"))[1] == {
            "weight_version": "5",
            "publication": 5,
            "step": 5,
            "epoch": 3,
            "digest": published.digest,
            "dtype": "float32",
            "adapter": None,
            "inexact_because": "the scripted engine has no model",
            "machine": {},
            "recomputes": False,
        }


async def test_a_client_that_disconnects_frees_its_slot(tiny: TinyModel) -> None:
    async with served(tiny, "transformers", max_running=1) as server:
        body = {"prompt": [1], "max_tokens": 250}
        disconnecting = asyncio.create_task(server.post("/v1/completions", body))
        await until(lambda: server.engine.stats().tokens >= 2)
        disconnecting.cancel()
        status, _ = await server.post("/v1/completions", {"prompt": [2], "max_tokens": 2})
        assert status == 200
        assert server.engine.stats().tokens < 250


async def test_a_full_queue_returns_503_until_it_has_space(tiny: TinyModel) -> None:
    async with served(tiny, max_queued=2) as server:
        await server.post("/pause?mode=keep")
        body = {"prompt": [1], "max_tokens": 1}
        waiting = [asyncio.create_task(server.post("/v1/completions", body)) for _ in range(2)]
        await until(lambda: server.engine.stats().queued == 2)
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            assert response.status == 503
            assert float(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["type"] == "queue_full"
        await server.post("/resume")
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_pause_and_resume_over_http(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        running = asyncio.create_task(server.post("/v1/completions", {"prompt": [1], "max_tokens": 200}))
        await until(lambda: server.engine.stats().tokens >= 2)
        assert await server.post("/pause?mode=abort") == (200, {"status": "paused"})
        _, reply = await running
        assert reply["choices"][0]["finish_reason"] == "abort"
        assert (await server.get("/is_paused"))[1] == {"is_paused": True}
        assert (await server.get("/health"))[1]["is_paused"] is True
        assert await server.post("/resume") == (200, {"status": "resumed"})
        assert (await server.get("/is_paused"))[1] == {"is_paused": False}
        status, reply = await server.post("/pause?mode=sometimes")
        assert (status, reply["error"]["param"]) == (400, "mode")


def test_a_scripted_server_starts_without_torch() -> None:
    code = (
        "import sys, rollbook.inference.server.app, rollbook.inference.client.client, rollbook.inference.weights.client, "
        "rollbook.inference.engines.scripted; print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


async def test_a_passed_socket_keeps_its_address_across_servers(tiny: TinyModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with tiny.engine("scripted") as engine:
            for _ in range(2):
                app = build_app(engine, engine_config("scripted"))
                async with serve(app, sock=sock.dup()) as url, aiohttp.ClientSession() as session:
                    assert url == address
                    async with session.get(url + "/health") as response:
                        assert response.status == 200


async def test_models_lists_maximum_length_and_vocabulary(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        _, reply = await server.get("/v1/models")
        assert reply["data"][0]["max_model_len"] == MAX_LEN
        assert reply["data"][0]["vocab_size"] == VOCAB


async def test_a_request_on_which_the_model_fails_returns_500(tiny: TinyModel, tmp_path: Path) -> None:
    async with served(tiny, "transformers") as server:
        body = update_body(tiny, 2)
        assert (await server.post("/update_weights", body))[0] == 200
        server.engine.parts.weights._targets["lm_head.weight"].fill_(float("nan"))  # type: ignore[attr-defined]
        status, reply = await server.post("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 1})
        assert (status, reply["error"]["type"]) == (500, "generation_failed")
        assert (await server.get("/health"))[0] == 200
