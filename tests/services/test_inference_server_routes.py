"""The routes for token ids, aborts, weight versions, checks and reloads, in vLLM's format; and a full queue."""

import asyncio
from pathlib import Path

import pytest

from tests.parts.inference.engines import TinyModel, until
from tests.services.test_inference_server import served, update_body


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("routes"))


async def test_generate_returns_ids_logprobs_and_version_spans_in_vllms_format(tiny: TinyModel) -> None:
    async with served(tiny, "transformers") as server:
        body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "logprobs": 0, "n": 2}}
        status, reply = await server.post("/inference/v1/generate", body)
        assert status == 200
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        choice = reply["choices"][0]
        assert [score["token_id"] for score in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": 5}]
        status, reply = await server.post("/inference/v1/generate", {"token_ids": [], "sampling_params": {}})
        assert (status, reply["error"]["param"]) == (400, "prompt")
        status, reply = await server.post("/inference/v1/generate", {**body, "model": "other"})
        assert (status, reply["error"]["param"]) == (404, "model")


async def test_an_aborted_request_returns_the_tokens_it_has(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        body = {"prompt": [1], "max_tokens": 200, "request_id": "mine", "return_token_ids": True, "logprobs": 0}
        running = asyncio.create_task(server.post("/v1/completions", body))
        other = asyncio.create_task(server.post("/v1/completions", {**body, "request_id": "other", "max_tokens": 60}))
        await until(lambda: server.engine.stats().tokens >= 6)
        assert (await server.post("/abort_requests", {"request_ids": ["mine", "unknown"]}))[1] == {
            "status": "aborted",
            "aborted": 1,
        }
        _, reply = await running
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 200
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert (await other)[1]["choices"][0]["finish_reason"] == "length"


async def test_a_trainer_of_vllm_that_invites_to_its_nccl_group_is_refused_at_once(tiny: TinyModel) -> None:
    group = {"master_address": "127.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 2, "packed": True}
    async with served(tiny) as server:
        status, reply = await server.post("/init_weight_transfer_engine", {"init_info": group})
        assert (status, reply["error"]["param"]) == (400, "backend")
        assert "SyncWeightTransferClient" in reply["error"]["message"]


async def test_start_and_finish_of_an_update_accept_only_the_current_version(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        assert (await server.get("/get_world_size"))[1] == {"world_size": 1}
        assert (await server.post("/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
        assert (await server.post("/start_weight_update"))[1] == {"message": "Weight update started"}
        assert (await server.post("/update_weights", update_body(tiny, 2)))[0] == 200
        assert (await server.post("/finish_weight_update", {"weight_version": "2"}))[0] == 200
        assert (await server.post("/update_weight_version", {"new_version": "2"}))[1]["success"] is True
        # Another version would make the versions of sampled tokens wrong.
        assert (await server.post("/update_weight_version", {"new_version": "best"}))[0] == 409
        assert (await server.post("/finish_weight_update", {"weight_version": "3"}))[0] == 409


async def test_the_weight_checker_returns_the_digest_of_the_weights_in_memory(tiny: TinyModel) -> None:
    async with served(tiny, "transformers") as server:
        published, _ = tiny.weights(1)
        _, check = await server.post("/weight_checker", {"action": "checksum"})
        assert check == {
            "digest": published.digest,
            "weight_version": "1",
            "published": published.digest,
            "dtype": "float32",
        }
        assert (await server.post("/weight_checker", {"action": "guess"}))[0] == 400


async def test_a_directory_is_reloaded_only_before_a_trainer_has_published(tiny: TinyModel) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tiny.model_dir)}}
    async with served(tiny, "transformers", published=None) as server:
        assert (await server.post("/collective_rpc", body))[1] == {"results": [None]}
        assert (await server.post("/collective_rpc", body))[0] == 200
        assert (await server.get("/weight_info"))[1]["weight_version"] == "1"
        # The publications of a trainer replace manual ones, whatever their numbers.
        assert (await server.post("/update_weights", update_body(tiny, 1)))[0] == 200
        assert (await server.post("/collective_rpc", body))[0] == 409
        assert (await server.post("/collective_rpc", {"method": "execute", "args": ["rm"]}))[0] == 400
        missing = {"method": "reload_weights", "kwargs": {"weights_path": "/no/such/directory"}}
        async with served(tiny, "transformers", published=None) as fresh:
            assert (await fresh.post("/collective_rpc", missing))[1]["error"]["type"] == "WeightsError"


async def test_of_a_thousand_requests_those_beyond_the_queue_get_503_and_the_others_complete(tiny: TinyModel) -> None:
    async with served(tiny, max_running=16, max_queued=600) as server:
        body = {"prompt": [1], "max_tokens": 4}
        responses = await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(1000)))
        statuses = [status for status, _ in responses]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 600
        assert all(reply["error"]["type"] == "queue_full" for status, reply in responses if status == 503)
        await until(lambda: server.engine.stats().running == server.engine.stats().queued == 0)
        assert (await server.post("/v1/completions", body))[0] == 200


async def test_an_update_without_file_or_tensors_is_rejected_naming_the_field(tiny: TinyModel, tmp_path: Path) -> None:
    async with served(tiny) as server:
        for changes, param in (
            ({"path": None}, "path"),
            ({"backend": "cuda_ipc"}, "names"),
            ({"backend": "nccl", "names": ["a"], "dtype_names": ["F32"], "shapes": [[1]]}, "backend"),
            ({"backend": "gloo"}, "backend"),
        ):
            status, reply = await server.post("/update_weights", update_body(tiny, 2, **changes))
            assert (status, reply["error"]["param"]) == (400, param)
