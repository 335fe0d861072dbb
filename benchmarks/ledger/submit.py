"""CPU time of the ledger process per submitted group, for each durability mode, with many connections.

`python -m benchmarks.ledger.submit` starts a ledger service and sends encoded groups of 8 x 1024 tokens. `http_alone` is the cost
of an aiohttp handler that only reads the body and responds.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop
from aiohttp import web

from benchmarks.ledger.bodies import submission
from benchmarks.report import machine, print_status
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.admission import RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.ledger.config import Durability, LedgerConfig, LedgerServerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.serve import serve_ledger
from rollbook.telemetry.events import EventLog

RUN = "bench"
SAMPLES, TOKENS = 8, 1024
WARM_UP = 300


def group_of(number: int, sample: RolloutSample) -> PromptGroup:
    task = TaskId(f"t{number}")
    return PromptGroup(id=GroupId(f"{task}@0"), task_id=task, draw=0, samples=(sample,) * SAMPLES)


def requests(count: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    is_response = np.arange(TOKENS) >= TOKENS // 2
    row = TokenRow(
        token_ids=rng.integers(0, 50_000, TOKENS).astype(np.int32),
        logprobs=np.where(is_response, -rng.random(TOKENS), 0.0).astype(np.float32),
        loss_mask=is_response,
        versions=np.full(TOKENS, -1, dtype=np.int32),
    )
    sample = RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=1.0)
    made = []
    for number in range(count):
        body = msgspec.msgpack.encode(submission(group_of(number, sample)))
        head = f"POST /v1/runs/{RUN}/submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        made.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


async def send(port: int, left: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while left:
        writer.write(left.pop())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the ledger responded {head[:60]!r}")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()


def serve(sock: socket.socket, directory: str, durability: str | None) -> None:
    """Runs in its own process. Without a durability it measures HTTP alone."""
    if durability is None:
        uvloop.run(_serve_http_alone(sock))
        return
    config = LedgerServerConfig(
        store=f"sqlite:///{directory}", ledger=LedgerConfig(durability=Durability(durability)), drain_s=1.0
    )
    uvloop.run(serve_ledger(config, log=EventLog("ledger"), sock=sock))


async def _serve_http_alone(sock: socket.socket) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"stored", headers={"Content-Type": wire.CONTENT_TYPE})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/v1/runs/{run}/submit", answer)
    app.router.add_route("*", "/v1/runs/{run}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    await asyncio.Event().wait()


async def drive(port: int, server: BaseProcess, *, num_groups: int, connections: int) -> dict[str, Any]:
    left = requests(num_groups + WARM_UP)
    settings = RunSettings(rule=FreshnessRule(groups_per_step=64, max_in_flight=64, max_head_offpolicy_versions=1))
    body = msgspec.msgpack.encode(wire.CreateRun(settings=settings))
    head = f"PUT /v1/runs/{RUN} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
    await send(port, [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body])
    warm, measured = left[:WARM_UP], left[WARM_UP:]
    await asyncio.gather(*(send(port, warm) for _ in range(connections)))
    process = psutil.Process(server.pid)
    before, started = process.cpu_times(), time.perf_counter()
    await asyncio.gather(*(send(port, measured) for _ in range(connections)))
    took, after = time.perf_counter() - started, process.cpu_times()
    cpu = (after.user - before.user) + (after.system - before.system)
    return {"cpu_ms_per_group": round(1e3 * cpu / num_groups, 4), "groups_per_s": round(num_groups / took, 1)}


def measure(durability: Durability | None, *, num_groups: int, connections: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, listening_socket("127.0.0.1", 0) as sock:
        name = None if durability is None else durability.value
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(sock, str(Path(directory) / "ledger"), name)
        )
        server.start()
        try:
            port = int(sock.getsockname()[1])
            return uvloop.run(drive(port, server, num_groups=num_groups, connections=connections))
        finally:
            server.terminate()
            server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of each kind, alternating; the best one is reported"
    )
    args = parser.parse_args()
    kinds: dict[str, Durability | None] = {"http_alone": None, **{d.value: d for d in Durability}}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, durability in kinds.items():
            found = measure(durability, num_groups=args.groups, connections=args.connections)
            rounds[name].append(found)
            print_status(
                f"{name:<14} {found['cpu_ms_per_group']:.3f} ms CPU a group, {found['groups_per_s']:.0f} groups/s"
            )
    best = {name: min(found, key=lambda f: f["cpu_ms_per_group"]) for name, found in rounds.items()}
    body_bytes = len(requests(1)[0])
    print(json.dumps({"best": best, "rounds": rounds, "body_bytes": body_bytes, "machine": machine()}))


if __name__ == "__main__":
    main()
