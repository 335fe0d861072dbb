"""A policy server that fails at every weight update: the client gets its exception, and gives up long before its deadline."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollbook.contracts.errors import TransientError
from rollbook.inference.engine import Engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.server.weight_updates import WeightUpdates
from rollbook.inference.weights import client as weights_client
from rollbook.inference.weights.client import UpdateFailsError, WeightTransferClient
from rollbook.inference.wire.weights import UpdateInfo
from rollbook.telemetry.waits import WAITS
from tests.parts.inference.engines import TinyModel, engine_config

LONG_S = 600.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("failing"))


@pytest.fixture
def is_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def apply(self: WeightUpdates, info: object) -> None:
        raise MemoryError("cannot allocate 61 GiB")

    monkeypatch.setattr(WeightUpdates, "apply", apply)
    monkeypatch.setattr(weights_client, "FAILING_S", 0.5)


@asynccontextmanager
async def server(tiny: TinyModel) -> AsyncIterator[tuple[str, Engine]]:
    async with (
        tiny.engine("scripted", published=None) as engine,
        serve(build_app(engine, engine_config("scripted"))) as url,
    ):
        yield url, engine


@pytest.mark.usefixtures("is_failing")
async def test_the_exception_of_the_server_ends_the_run_and_is_reported_meanwhile(tiny: TinyModel) -> None:
    published, path = tiny.weights(1)
    reports: list[tuple[str, str]] = []
    WAITS.listen(lambda awaited, cause: reports.append((awaited, cause)))
    try:
        async with server(tiny) as (url, _), WeightTransferClient([url], request_s=LONG_S) as client:
            with pytest.raises(UpdateFailsError, match=r"(?s)failed \d+ times.*MemoryError: cannot allocate 61 GiB"):
                await client.receive(published, str(path), within_s=LONG_S)
    finally:
        WAITS.listen(lambda awaited, cause: None)
    assert all(awaited == "the policy servers to load weights" and "61 GiB" in cause for awaited, cause in reports)


async def test_a_replica_that_always_fails_is_quarantined_while_another_one_accepts_the_weights(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, path = tiny.weights(1)
    monkeypatch.setattr(weights_client, "FAILING_S", 0.5)
    apply = WeightUpdates.apply
    async with server(tiny) as (good, _), server(tiny) as (bad, failing):

        async def apply_unless_failing(self: WeightUpdates, info: UpdateInfo) -> None:
            if self._engine is failing:
                raise MemoryError("cannot allocate 61 GiB")
            await apply(self, info)

        monkeypatch.setattr(WeightUpdates, "apply", apply_unless_failing)
        async with WeightTransferClient([good, bad], request_s=LONG_S, confirm_s=LONG_S) as client:
            await client.receive(published, str(path), within_s=LONG_S)
            assert client.quarantined == (bad,)


async def test_an_address_where_nothing_ever_listened_is_given_up(tiny: TinyModel) -> None:
    published, path = tiny.weights(1)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with WeightTransferClient([url], request_s=LONG_S, absent_s=0.5) as client:
        with pytest.raises(UpdateFailsError, match=r"no policy server at .* \(inference.urls\)"):
            await client.receive(published, str(path), within_s=LONG_S)


@pytest.mark.usefixtures("is_failing")
async def test_a_server_answers_an_unexpected_error_with_its_class_and_text(tiny: TinyModel) -> None:
    published, path = tiny.weights(1)
    async with server(tiny) as (url, _), WeightTransferClient([url], request_s=0.3) as client:
        with pytest.raises(
            TransientError, match=r"returned 500 \(InternalError\): MemoryError: cannot allocate 61 GiB"
        ):
            await client.receive(published, str(path))
