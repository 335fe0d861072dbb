"""The Atropos API over HTTP: every endpoint, status and message."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.access.guard import AllowedClients
from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.config import AtroposConfig
from tests.parts.ledger.atropos import Client, dialect, registration, scored
from tests.parts.ledger.groups import group_of, settings, submission_of

KEYS = [
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *(
        "inference_logprobs",
        "overrides",
        "group_overrides",
        "images",
        "env_id",
        "distill_token_ids",
        "distill_logprobs",
    ),
]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with dialect(tmp_path) as client:
        yield client


async def test_the_responses_before_a_trainer_registers(client: Client) -> None:
    assert await client.get("/") == {"message": "AtroposLib API"}
    assert await client.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await client.get("/wandb_info") == {"group": None, "project": None}
    assert await client.get("/status") == {"current_step": 0, "queue_size": 0}
    assert await client.get("/batch") == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert (await client.get("/latest_example"))["tokens"] == []
    request = {"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 2}
    assert await client.post("/register-env", request) == {"status": "wait for trainer to start"}


async def test_the_published_order_of_requests_works(client: Client) -> None:
    """register, register-env, scored_data, batch: the workflow in the documentation of the original."""
    await client.register(2)
    request = {"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 2}
    registered = await client.post("/register-env", request)
    assert (registered["status"], registered["env_id"], registered["starting_step"]) == ("success", 0, 0)
    assert await client.post("/scored_data", scored(1, env_id=0)) == {"status": "received"}
    assert await client.batch() == ["1"]
    assert await client.post("/disconnect-env", {"env_id": 0}) == {"status": "success"}


async def test_environments_can_be_made_to_wait_for_the_first_batch_request(tmp_path: Path) -> None:
    """As the code of the original does."""
    request = {"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 2}
    async with dialect(tmp_path, config=AtroposConfig(wait_for_batch=True)) as client:
        await client.register(4)
        assert await client.post("/register-env", request) == {"status": "wait for trainer to start"}
        assert await client.get("/batch") == {"batch": None}
        assert (await client.post("/register-env", request))["status"] == "success"


async def test_an_environment_may_register_after_the_trainer(client: Client) -> None:
    request = {"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 2}
    await client.register(4)
    assert await client.post("/register-env", request) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "e_0",
        "checkpoint_dir": "here",
        "starting_step": 0,
        "checkpoint_interval": 5,
        "num_steps": 9,
    }
    assert (await client.post("/register-env", request))["wandb_name"] == "e_1"
    assert await client.get("/info") == {"batch_size": 4, "max_token_len": 99}
    assert await client.get("/wandb_info") == {"group": "group", "project": "project"}


async def test_numbers_keep_every_digit_and_every_key_is_present(client: Client) -> None:
    await client.start(2)
    digits = "[[1.0,-0.1234567890123456789,-1e-7],[0.30000000000000004,5e-324,1]]"
    body = (
        '{"tokens":[[9007199254740993,2,3],[4,5,6]], "masks":[[-100,2,3],[-100,-100,6]], "scores":[1,0.1],'
        f'"inference_logprobs":{digits}, "messages":[[{{"role":"user","content":"é \\u00e9","reward":null}}],[]]}}'
    )
    headers = {"Content-Type": "application/json"}
    assert (await client.status_of("POST", "/scored_data", data=body, headers=headers))[0] == 200
    async with client.session.get(f"{client.url}/batch") as answer:
        text = await answer.text()
    (group,) = json.loads(text)["batch"]
    assert set(group) == set(KEYS)
    assert digits in text
    assert group["tokens"][0][0] == 9007199254740993
    assert group["messages"] == [[{"role": "user", "content": "é é", "reward": None}], []]
    assert group["advantages"] is group["env_id"] is None


async def test_unknown_fields_are_dropped(client: Client) -> None:
    await client.start(2)
    await client.post("/scored_data", scored(1, unknown=7))
    (group,) = (await client.get("/batch"))["batch"]
    assert set(group) == set(KEYS)
    assert group["tokens"][0][0] == 1


@pytest.mark.parametrize("accept", ["identity", "gzip, deflate"])
async def test_requests_and_responses_may_be_compressed(client: Client, accept: str) -> None:
    await client.start(4)
    body = gzip.compress(json.dumps(scored(1, 4, images=["x" * 5000])).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (await client.status_of("POST", "/scored_data", data=body, headers=headers))[0] == 200
    async with client.session.get(f"{client.url}/batch", headers={"Accept-Encoding": accept}) as answer:
        assert answer.headers.get("Content-Encoding") == (None if accept == "identity" else "gzip")
        assert len(json.loads(await answer.text())["batch"]) == 1


@pytest.mark.parametrize("accept", ["identity", "gzip, deflate"])
@pytest.mark.parametrize("num_groups", [7, 8, 9, 33])
async def test_a_batch_has_its_groups_in_the_order_of_the_posts(client: Client, accept: str, num_groups: int) -> None:
    await client.start(2 * num_groups)
    for number in range(num_groups):
        await client.post("/scored_data", scored(number, 2, images=["x" * (97 * number)]))
    async with client.session.get(f"{client.url}/batch", headers={"Accept-Encoding": accept}) as answer:
        raw = await answer.read()  # decompressed by the client, which checks the checksum
    assert [group["tokens"][0][0] for group in json.loads(raw)["batch"]] == [
        scored(number, 2)["tokens"][0][0] for number in range(num_groups)
    ]


@pytest.mark.parametrize("accept", ["identity", "gzip"])
async def test_a_compressed_batch_is_one_gzip_member(client: Client, accept: str) -> None:
    """Over HTTP/1.0, without chunks: the body ends with the connection."""
    await client.start(34)
    for number in range(17):
        await client.post("/scored_data", scored(number, 2))
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /batch HTTP/1.0\r\nHost: {host}\r\nAccept-Encoding: {accept}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"chunked" not in head
    if accept == "gzip":
        decompressor = zlib.decompressobj(31)
        body = decompressor.decompress(body)
        assert decompressor.eof
        assert decompressor.unused_data == b""
    assert len(json.loads(body)["batch"]) == 17


async def test_invalid_bodies_and_paths_have_the_status_of_the_original(client: Client) -> None:
    gzipped = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert await client.status_of("POST", "/scored_data", data=b"plain", headers=gzipped) == (
        400,
        "Invalid gzip payload",
    )
    whole = gzip.compress(json.dumps(scored(1)).encode())
    status, _ = await client.status_of("POST", "/scored_data", data=whole[:-20], headers=gzipped)
    assert status in (400, 422)
    status, answer = await client.status_of(
        "POST", "/scored_data", data=b"{", headers={"Content-Type": "application/json"}
    )
    assert (status, answer["detail"][0]["type"]) == (422, "json_invalid")
    status, _ = await client.status_of("POST", "/scored_data", data=b"{}", headers={"Content-Type": "text/plain"})
    assert status == 422
    status, answer = await client.status_of("POST", "/register", json={**registration(4), "batch_size": "four"})
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "batch_size"])
    assert (await client.status_of("POST", "/batch"))[0] == 405
    assert await client.status_of("GET", "/nothing") == (404, {"detail": "Not Found"})


async def test_field_types_are_lax(client: Client) -> None:
    assert (await client.status_of("POST", "/register", json={**registration(4), "batch_size": "4"}))[0] == 200
    assert (await client.get("/info"))["batch_size"] == 4
    group = {**scored(1), "tokens": [["1", 2.0, True], [4, 5, 6]]}
    assert (await client.status_of("POST", "/scored_data", json=group))[0] == 200
    assert (await client.get("/latest_example"))["tokens"] == [[1, 2, 1], [4, 5, 6]]
    group["tokens"] = [[1.5, 2, 3], [4, 5, 6]]
    status, answer = await client.status_of("POST", "/scored_data", json=group)
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "tokens", 0, 0])


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"scores": [float("nan"), 1.0]}, ["scores", 0]),
        ({"inference_logprobs": [[1.0], [float("inf")]]}, ["inference_logprobs", 1, 0]),
        ({"generation_params": {"temperature": float("-inf")}}, ["generation_params", "temperature"]),
        ({"masks": [[1, 2, 3], [1, 2]]}, ["masks", 1]),
        ({"masks": [[1, 2, 3]]}, ["masks"]),
        ({"messages": [[{"role": "user"}]]}, ["messages"]),
    ],
)
async def test_the_error_for_an_invalid_group_has_its_location(
    client: Client, change: dict[str, Any], location: list[str | int]
) -> None:
    await client.start(2)
    body = json.dumps({**scored(1), **change})
    headers = {"Content-Type": "application/json"}
    status, answer = await client.status_of("POST", "/scored_data", data=body, headers=headers)
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", *location])
    assert await client.batch() is None


async def test_optional_fields_may_have_any_length(client: Client) -> None:
    await client.start(2)
    await client.post("/scored_data", scored(1, advantages=[[0.5]], distill_token_ids=[[[1, 2]]]))
    assert await client.batch() == ["1"]


async def test_a_group_larger_than_the_batch_is_rejected(client: Client) -> None:
    await client.post("/scored_data", scored(1, 5))
    await client.start(4)
    status, answer = await client.status_of("POST", "/scored_data", json=scored(2, 5))
    assert status == 422
    assert "5 sequences" in answer["detail"][0]["msg"]
    await client.post("/scored_data", scored(3, 4))
    assert await client.batch() == ["3"]
    assert await client.audited() == {"batched": 1, "dropped": 1}


async def test_a_list_of_groups_is_stored_completely_or_not_at_all(client: Client) -> None:
    await client.start(4)
    env = await client.env(group_size=2)
    answer = await client.post("/scored_data_list", [scored(1, env_id=env), scored(2, 1, env_id=env)])
    assert answer == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 1}
    status, answer = await client.status_of("POST", "/scored_data_list", json=[scored(3), {"tokens": []}])
    assert (status, answer["detail"][0]["loc"][:2]) == (422, ["body", 1])
    assert await client.get("/status") == {"current_step": 0, "queue_size": 1}


async def test_groups_of_other_sizes_are_buffered_until_they_add_up(client: Client) -> None:
    await client.start(4)
    env = await client.env(group_size=4)
    assert await client.post("/scored_data", scored(1, 3, env_id=env)) == {"status": "buffered", "buffer_size": 3}
    assert await client.post("/scored_data", scored(2, 2, env_id=env)) == {"status": "buffered", "buffer_size": 5}
    assert await client.batch() is None
    assert await client.post("/scored_data", scored(3, 1, env_id=env)) == {"status": "buffered", "buffer_size": 2}
    assert await client.batch() == ["1", "3"]
    assert await client.post("/scored_data", scored(4, 4, env_id=env)) == {"status": "received"}
    assert await client.batch() == ["4"]


async def test_batches_are_in_order_and_the_step_counts_them(client: Client) -> None:
    await client.start(4)
    for name in range(6):
        await client.post("/scored_data", scored(name))
    for step, expected in enumerate((["0", "1"], ["2", "3"], ["4", "5"]), 1):
        assert await client.batch() == expected
        assert (await client.get("/status"))["current_step"] == step
    assert await client.batch() is None
    assert await client.audited() == {"trained": 6}


async def test_groups_of_different_sizes_fill_a_batch(client: Client) -> None:
    await client.start(8)
    for name, size in enumerate((3, 7, 5, 3, 5)):
        await client.post("/scored_data", scored(name, size))
    assert await client.batch() == ["0", "2"]
    assert await client.batch() == ["3", "4"]
    assert await client.batch() is None


async def test_status_env_has_the_counts_of_the_original(client: Client) -> None:
    await client.start(16)
    one, other = await client.env("one", group_size=2, weight=3), await client.env("other", group_size=4, minimum=0.25)
    for name in range(3):
        await client.post("/scored_data", scored(name, 2, env_id=one))
    for name in range(2):
        await client.post("/scored_data", scored(name, 4, env_id=other))
    assert await client.get("/status-env", {"env_id": one}) == {
        "current_step": 0,
        "queue_size": (6 + 8 - 4) // 2,
        "unallocated_fraction": 0.75,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.75,
    }
    status, _ = await client.status_of("GET", "/status-env", json={"env_id": 7})
    assert status == 404
    assert (await client.post("/scored_data", scored(9, env_id=7)))["status"] == "received"
    assert await client.post("/disconnect-env", {"env_id": one}) == {"status": "success"}
    assert (await client.post("/disconnect-env", {"env_id": 7}))["status"] == "failure"


async def test_a_reset_drops_all_groups(client: Client) -> None:
    await client.start(2)
    for name in range(3):
        await client.post("/scored_data", scored(name))
    assert await client.batch() == ["0"]
    assert await client.get("/reset_data") == "Reset successful"
    assert await client.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await client.get("/status") == {"current_step": 0, "queue_size": 0}
    await client.start(2)
    await client.post("/scored_data", scored(9))
    assert await client.batch() == ["9"]
    assert (await client.get("/status"))["current_step"] == 1
    assert await client.audited() == {"trained": 1, "batched": 1, "dropped": 2}


async def test_a_reset_of_a_native_run_is_refused_and_changes_nothing(client: Client) -> None:
    ledger, run = client.ledger, RunId("native")
    await ledger.create_run(run, settings(per_step=1))
    epoch = (await ledger.take_role(run, restored_step=0)).epoch
    await ledger.register(run, 0, "weights", epoch=epoch)
    for task in ("trained next", "queued"):
        await ledger.submit(run, submission_of(group_of(task)))
    assert await ledger.decide(run, 1, epoch=epoch, wait_s=0) is not None
    before = await ledger.status(run)
    status, answer = await client.status_of("GET", "/atropos/native/reset_data")
    assert (status, "native run" in answer["detail"]) == (409, True)
    assert await ledger.status(run) == before


async def test_other_runs_are_served_under_a_prefix(client: Client) -> None:
    await client.start(2)
    await client.post("/atropos/second/register", registration(4))
    await client.post("/atropos/second/scored_data", scored(5, 4))
    assert await client.batch() is None
    assert len((await client.get("/atropos/second/batch"))["batch"]) == 1
    assert await client.get("/atropos/third/info") == {"batch_size": -1, "max_token_len": -1}


async def test_cors_headers_are_sent_to_allowed_origins_only(tmp_path: Path) -> None:
    async with dialect(tmp_path, allowed=AllowedClients.of([], ["http://x"])) as client:
        for origin, status, allowed in (("http://x", 200, "http://x"), ("http://y", 403, None)):
            request = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            async with client.session.options(f"{client.url}/register", headers=request) as answer:
                assert (answer.status, answer.headers.get("Access-Control-Allow-Origin")) == (status, allowed)
            async with client.session.get(f"{client.url}/info", headers={"Origin": origin}) as answer:
                assert (answer.status, answer.headers.get("Access-Control-Allow-Origin")) == (status, allowed)
                assert answer.headers.get("Access-Control-Allow-Credentials") == ("true" if allowed else None)


@pytest.mark.parametrize(
    "agent", ["curl/8.5.0", "python-requests/2.32.3", "Python/3.11 aiohttp/3.14.5", "python-httpx/0.28", None]
)
async def test_requests_that_change_data_by_get_work_for_clients_and_are_refused_to_browsers(
    client: Client, agent: str | None
) -> None:
    await client.start(2)
    await client.post("/scored_data", scored(1))
    browser = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"}
    for path in ("/batch", "/reset_data"):
        link = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"}
        for refused in (browser, {"Sec-Fetch-Site": "none"}, link, {**browser, "Referer": "http://evil.example/docs"}):
            async with client.session.get(client.url + path, headers=refused) as answer:
                assert answer.status == 403
                assert "refused to browsers" in (await answer.json())["detail"]
    headers = {} if agent is None else {"User-Agent": agent}
    async with client.session.get(f"{client.url}/batch", headers=headers) as answer:
        assert len((await answer.json())["batch"]) == 1
    async with client.session.get(f"{client.url}/reset_data", headers=headers) as answer:
        assert await answer.text() == "Reset successful"


@pytest.mark.parametrize("sender", ["loopback", "plain HTTP"])
async def test_the_documentation_page_may_send_every_request(client: Client, sender: str) -> None:
    """ "Try it out" of Swagger UI: a script of a page of this server."""
    await client.start(2)
    await client.post("/scored_data", scored(1))
    own = {
        "loopback": {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        "plain HTTP": {"User-Agent": "Mozilla/5.0", "Referer": f"{client.url}/docs"},
    }[sender]
    async with client.session.get(f"{client.url}/batch", headers=own) as answer:
        assert len((await answer.json())["batch"]) == 1
    async with client.session.get(f"{client.url}/reset_data", headers=own) as answer:
        assert await answer.text() == "Reset successful"
    origin = {**own, "Origin": client.url}
    async with client.session.post(f"{client.url}/register", json=registration(2), headers=origin) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(("prefix", "server"), [("", "/"), ("/atropos/second", "/atropos/second")])
async def test_the_api_describes_itself(client: Client, prefix: str, server: str) -> None:
    described = await client.get(f"{prefix}/openapi.json")
    assert described["info"]["title"] == "AtroposLib API"
    assert described["servers"] == [{"url": server}]
    assert (await client.get("/v1/openapi.json"))["info"]["title"] == "Rollbook ledger, native API"
    assert set(described["paths"]) >= {"/batch", "/scored_data", "/status-env"}
    assert [p["name"] for p in described["paths"]["/status-env"]["get"]["parameters"]] == ["env_id"]


@pytest.mark.parametrize("prefix", ["", "/atropos/atropos"])
@pytest.mark.parametrize(("page", "script"), [("/docs", b"SwaggerUIBundle"), ("/redoc", b"Redoc")])
async def test_the_documentation_pages_load_their_files_from_this_server(
    client: Client, prefix: str, page: str, script: bytes
) -> None:
    async with client.session.get(f"{client.url}{prefix}{page}") as answer:
        text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    files = re.findall(r"(?:src|href)=(docs/static/[^ >]+)", text)
    assert files
    contents = []
    for file in files:
        async with client.session.get(f"{client.url}{prefix}/{file}") as answer:
            assert answer.status == 200
            contents.append(await answer.read())
    assert any(script in content for content in contents)
    assert (await client.status_of("GET", f"{prefix}/docs/static/..%2F__init__.py"))[0] == 404


async def test_an_environment_registers_with_the_published_fields_only(client: Client) -> None:
    await client.start(2)
    request = {"max_token_length": 8, "desired_name": "e", "weight": 1.0}
    assert (await client.post("/register-env", request))["env_id"] == 0
    assert await client.post("/scored_data", scored(1, 1, env_id=0)) == {"status": "received"}
    assert (await client.get("/status-env?env_id=0"))["self_queue_size"] == 1
    assert await client.get("/status-env?env_id=0") == await client.get("/status-env", {"env_id": 0})
    status, answer = await client.status_of("GET", "/status-env?env_id=x")
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "env_id"])


async def test_a_minimum_or_weight_that_no_batch_can_be_computed_from_is_rejected(client: Client) -> None:
    await client.start(2)
    request = {"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 2}
    for name in ("min_batch_allocation", "weight"):
        status, answer = await client.status_of("POST", "/register-env", json={**request, name: 1e308})
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", name])
    await client.env(minimum=5.0)
    await client.post("/scored_data", scored(1, env_id=0))
    assert await client.batch() == ["1"]


async def test_registering_again_keeps_the_groups_and_says_so(client: Client) -> None:
    await client.start(2)
    for name in range(3):
        await client.post("/scored_data", scored(name))
    assert await client.batch() == ["0"]
    answer = await client.post("/register", registration(2))
    assert "2 queued groups are kept" in answer["message"]
    assert "/reset_data" in answer["message"]
    assert (await client.get("/status"))["current_step"] == 1
    assert await client.batch() == ["1"]


async def test_registering_again_can_reset_the_server_as_published(tmp_path: Path) -> None:
    async with dialect(tmp_path, config=AtroposConfig(register_again="reset")) as client:
        await client.start(2)
        env = await client.env()
        for name in range(3):
            await client.post("/scored_data", scored(name))
        assert await client.batch() == ["0"]
        assert "were dropped" in (await client.post("/register", registration(2)))["message"]
        assert await client.get("/status") == {"current_step": 0, "queue_size": 0}
        assert (await client.post("/disconnect-env", {"env_id": env}))["status"] == "failure"
        await client.post("/scored_data", scored(9))
        assert await client.batch() == ["9"]
        assert await client.audited() == {"trained": 1, "batched": 1, "dropped": 2}


async def test_a_trainer_that_registers_with_step_0_continues_after_any_number_of_batches(tmp_path: Path) -> None:
    async with dialect(tmp_path, config=AtroposConfig(keep_batches=2)) as client:
        await client.start(2)
        for name in range(6):
            await client.post("/scored_data", scored(name))
        assert [await client.batch() for _ in range(5)] == [["0"], ["1"], ["2"], ["3"], ["4"]]
        await client.register(2)
        assert await client.batch() == ["5"]
        assert (await client.get("/status"))["current_step"] == 6
        await client.audited()


async def test_another_batch_size_gives_batches_of_that_size(client: Client) -> None:
    await client.start(2)
    for name in range(6):
        await client.post("/scored_data", scored(name))
    assert await client.batch() == ["0"]
    await client.register(4)
    assert await client.batch() == ["1", "2"]
    status, answer = await client.status_of("POST", "/register", json=registration(2, starting_step=1))
    assert status == 409
    assert "batch 2 was served with 4 sequences" in answer["detail"]
    await client.register(4, starting_step=1)
    assert await client.batch() == ["1", "2"]
    await client.audited()


async def test_an_undelivered_batch_of_another_size_is_queued_again(client: Client) -> None:
    await client.start(4)
    env = await client.env("e", group_size=2)
    for name in range(5):
        await client.post("/scored_data", scored(name, env_id=env, images=["x" * 900_000]))
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await reader.read(100)
    writer.transport.abort()  # the trainer disconnects before it has the whole batch
    await client.register(6)
    assert await client.batch() == ["0", "1", "2"]
    assert (await client.get("/status"))["queue_size"] == 2
    report = await client.audited()
    assert report == {"trained": 2, "batched": 3, "queued": 2}


async def test_batches_respect_the_weights_of_environments(client: Client) -> None:
    await client.start(8)
    heavy, light = await client.env("heavy", weight=3), await client.env("light", weight=1)
    for _ in range(80):
        await client.post("/scored_data", scored(1, env_id=heavy))
        await client.post("/scored_data", scored(2, env_id=light))
    names = [name for _ in range(20) for name in await client.batch() or ()]
    assert len(names) == 80
    assert 58 <= names.count("1") <= 62


async def test_a_small_weight_gets_its_share_over_many_batches(client: Client) -> None:
    await client.start(2)
    heavy, light = await client.env("heavy", weight=9), await client.env("light", weight=1)
    for _ in range(100):
        await client.post("/scored_data_list", [scored(1, env_id=heavy), scored(2, env_id=light)])
    names = [name for _ in range(100) for name in await client.batch() or ()]
    assert 3 <= names.count("2") <= 20


async def test_a_minimum_comes_before_weights(client: Client) -> None:
    await client.start(8)
    heavy, light = await client.env("heavy", weight=9), await client.env("light", weight=1, minimum=0.5)
    for _ in range(8):
        await client.post("/scored_data_list", [scored(1, env_id=heavy), scored(2, env_id=light)])
    assert sorted(await client.batch() or ()) == ["1", "1", "2", "2"]


async def test_requests_are_counted_in_the_metrics(client: Client) -> None:
    await client.start(2)
    await client.get("/atropos/atropos/info")
    await client.status_of("GET", "/nothing")
    text = await client.get("/metrics")
    assert 'rollbook_ledger_requests_total{route="atropos:/batch",status="200"} 1' in text
    assert 'rollbook_ledger_requests_total{route="atropos:/info",status="200"} 1' in text
    assert 'rollbook_ledger_requests_total{route="atropos:unknown",status="404"} 1' in text


async def test_a_policy_version_is_served_where_it_was_posted(client: Client) -> None:
    await client.start(4)
    await client.post("/scored_data", scored(1, policy_version=3))
    await client.post("/scored_data", scored("2", policy_version=["3", 4]))
    first, second = (await client.get("/batch"))["batch"]
    assert (first["policy_version"], second["policy_version"]) == (3, [3, 4])


def test_a_server_for_other_machines_is_refused_with_the_flags_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollbook.commands.servers.run_api", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert all(flag in line for flag in ("--open-to-all", "--allow-host NAME"))
