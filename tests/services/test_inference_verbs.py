"""The verbs of vLLM at our own server: aborting, naming, checking, reloading; and a crowd that waits."""

import asyncio
from pathlib import Path

import pytest

from tests.parts.inference.engines import TinyModel, until
from tests.services.test_inference_server import served, update_body


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("verbs"))


async def test_generate_answers_with_ids_logprobs_and_spans_in_vllms_shape(tiny: TinyModel) -> None:
    async with served(tiny, "transformers") as server:
        asked = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "logprobs": 0, "n": 2}}
        status, reply = await server.post("/inference/v1/generate", asked)
        assert status == 200
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        choice = reply["choices"][0]
        assert [score["token_id"] for score in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": 5}]
        status, reply = await server.post("/inference/v1/generate", {"token_ids": [], "sampling_params": {}})
        assert (status, reply["error"]["param"]) == (400, "prompt")
        status, reply = await server.post("/inference/v1/generate", {**asked, "model": "other"})
        assert (status, reply["error"]["param"]) == (404, "model")


async def test_a_request_is_aborted_by_its_name_and_keeps_what_it_has(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        body = {"prompt": [1], "max_tokens": 200, "request_id": "mine", "return_token_ids": True, "logprobs": 0}
        running = asyncio.create_task(server.post("/v1/completions", body))
        other = asyncio.create_task(server.post("/v1/completions", {**body, "request_id": "yours", "max_tokens": 60}))
        await until(lambda: server.engine.stats().tokens >= 6)
        assert (await server.post("/abort_requests", {"request_ids": ["mine", "nobody"]}))[1] == {
            "status": "aborted",
            "aborted": 1,
        }
        _, reply = await running
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 200
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert (await other)[1]["choices"][0]["finish_reason"] == "length"


async def test_the_bracket_of_an_update_is_accepted_and_names_only_what_is_there(tiny: TinyModel) -> None:
    async with served(tiny) as server:
        assert (await server.get("/get_world_size"))[1] == {"world_size": 1}
        assert (await server.post("/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
        assert (await server.post("/start_weight_update"))[1] == {"message": "Weight update started"}
        assert (await server.post("/update_weights", update_body(tiny, 2)))[0] == 200
        assert (await server.post("/finish_weight_update", {"weight_version": "2"}))[0] == 200
        assert (await server.post("/update_weight_version", {"new_version": "2"}))[1]["success"] is True
        # Any other name would make the stamps of tokens untrue.
        assert (await server.post("/update_weight_version", {"new_version": "best"}))[0] == 409
        assert (await server.post("/finish_weight_update", {"weight_version": "3"}))[0] == 409


async def test_the_checker_tells_the_digest_of_the_weights_in_use(tiny: TinyModel) -> None:
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


async def test_a_directory_is_reloaded_only_where_no_trainer_has_published(tiny: TinyModel) -> None:
    asked = {"method": "reload_weights", "kwargs": {"weights_path": str(tiny.model_dir)}}
    async with served(tiny, "transformers", published=None) as server:
        assert (await server.post("/collective_rpc", asked))[1] == {"results": [None]}
        assert (await server.post("/collective_rpc", asked))[0] == 200
        assert (await server.get("/weight_info"))[1]["weight_version"] == "1"
        # A trainer comes: its publications follow, whatever their numbers.
        assert (await server.post("/update_weights", update_body(tiny, 1)))[0] == 200
        assert (await server.post("/collective_rpc", asked))[0] == 409
        assert (await server.post("/collective_rpc", {"method": "execute", "args": ["rm"]}))[0] == 400
        missing = {"method": "reload_weights", "kwargs": {"weights_path": "/no/such/place"}}
        async with served(tiny, "transformers", published=None) as fresh:
            assert (await fresh.post("/collective_rpc", missing))[1]["error"]["type"] == "WeightsError"


async def test_a_thousand_requests_wait_in_bounds_and_all_are_answered(tiny: TinyModel) -> None:
    async with served(tiny, max_running=16, max_queued=600) as server:
        body = {"prompt": [1], "max_tokens": 4}
        answers = await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(1000)))
        statuses = [status for status, _ in answers]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 600
        assert all(reply["error"]["type"] == "queue_full" for status, reply in answers if status == 503)
        await until(lambda: server.engine.stats().running == server.engine.stats().queued == 0)
        assert (await server.post("/v1/completions", body))[0] == 200


async def test_an_update_that_names_no_file_or_no_tensors_is_refused_by_field(tiny: TinyModel, tmp_path: Path) -> None:
    async with served(tiny) as server:
        for changes, param in (
            ({"path": None}, "path"),
            ({"backend": "gloo"}, "names"),
            ({"backend": "gloo", "names": ["a"], "dtype_names": ["F32"], "shapes": [[1]]}, "backend"),
        ):
            status, reply = await server.post("/update_weights", update_body(tiny, 2, **changes))
            assert (status, reply["error"]["param"]) == (400, param)
