"""HTTP in: parse, call the service, reply. MessagePack bodies under `/v1/runs/{run}/…`; errors as `{kind, message}`.

`routes.py` says what there is; this module answers it. Doors, in this order: the token's role, the form and size of the body, the
fields of the message, and last the rules of the ledger.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TypeVar

from aiohttp import web

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import OwnerId, RunId
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Keys
from rollbook.ledger.http.bodies import BodyReader, reply
from rollbook.ledger.http.errors import KNOWN, NotFoundError, refusal
from rollbook.ledger.http.fast_path import HOT_ROUTES, HotRoute, HotRoutes
from rollbook.ledger.http.metrics import RequestNumbers, ledger_metrics
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.routes import ROUTES, Route
from rollbook.ledger.http.streams import QUIET_S, send_frames, send_statuses
from rollbook.ledger.http.submit import Submitting, drop_reason
from rollbook.ledger.http.views import audit_view, group_view, life_view, producer_view
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_run
from rollbook.ledger.tools.explain import explain_group
from rollbook.telemetry.loop_lag import LoopLag
from rollbook.telemetry.prometheus import CONTENT_TYPE as METRICS_CONTENT_TYPE

M = TypeVar("M", bound=wire.Message)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_LISTED = 1_000
USUALLY_LISTED = 100


def build_app(ledger: Ledger, config: LedgerConfig, *, keys: Keys | None = None) -> web.Application:
    """The native dialect. Without `keys` every door is open."""
    # Bodies are bounded where they are read; this bound is for other dialects on the same application.
    app = web.Application(client_max_size=int(config.max_body_mb * 1_000_000))
    native = NativeRoutes(ledger, config)
    app[HOT_ROUTES] = HotRoutes(native.bodies)
    for hot in native.hot_routes(keys or Keys({})):
        app[HOT_ROUTES].add(hot)
    # The busiest first: aiohttp looks for a path from the top, and a batch takes a thousand of these for one of the others.
    for route in sorted(ROUTES, key=lambda route: not route.name.startswith("submit")):
        app.router.add_route(route.method, route.path, native.door(route, keys or Keys({})))

    async def measuring(_: web.Application) -> AsyncIterator[None]:
        ticking = asyncio.create_task(native.lag.run(), name="ledger.loop_lag")
        yield
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking

    async def stop_waiting(_: web.Application) -> None:
        ledger.stop_waiting()

    app.cleanup_ctx.append(measuring)
    app.on_shutdown.append(stop_waiting)
    return app


class NativeRoutes:
    """One method for each line of `ROUTES`, of the same name."""

    def __init__(self, ledger: Ledger, config: LedgerConfig) -> None:
        self._ledger = ledger
        self._submitting = Submitting(ledger)
        self.bodies = BodyReader(config)
        self._body_s = config.body_s
        self._numbers = RequestNumbers()
        self._clock = SystemClock()
        self.lag = LoopLag(self._clock)

    def door(self, route: Route, keys: Keys) -> Handler:
        """The handler of a route behind its checks; whatever it raises on purpose becomes a clear answer."""
        answer: Handler = getattr(self, route.name)
        now, count = self._clock.now, self._numbers.add

        async def handle(request: web.Request) -> web.StreamResponse:
            started = now()
            status = HTTPStatus.INTERNAL_SERVER_ERROR.value
            try:
                if route.roles is not None:
                    keys.require(request.headers.get("Authorization"), route.roles)
                response = await answer(request)
                status = response.status
                return response
            except KNOWN as error:
                refused = refusal(error)
                status = refused.status
                return refused
            finally:
                count(route.name, status, now() - started)

        return handle

    # ------------------------------------------------------------------ looking

    async def health(self, request: web.Request) -> web.Response:
        answer = wire.Health(status="ok", runs=len(await self._ledger.runs()))
        return reply(request, answer, json_by_default=True)

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi_document())

    async def metrics(self, _: web.Request) -> web.Response:
        statuses = [await self._ledger.status(run_id) for run_id in await self._ledger.runs()]
        text = ledger_metrics(
            statuses,
            requests=self._numbers,
            lag=self.lag,
            receiving=self.bodies.receiving_bytes,
            received=self.bodies.received_bytes,
        )
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def runs(self, request: web.Request) -> web.Response:
        return reply(request, await self._ledger.runs(), json_by_default=True)

    async def status(self, request: web.Request) -> web.Response:
        return reply(request, await self._ledger.status(_run(request)), json_by_default=True)

    async def progress(self, request: web.Request) -> web.Response:
        return reply(request, await self._ledger.progress(_run(request)), json_by_default=True)

    async def audit(self, request: web.Request) -> web.Response:
        run_id = _run(request)
        report = await self._ledger.read(lambda tx: audit_run(tx, run_id))
        return reply(request, audit_view(report), json_by_default=True)

    async def events(self, request: web.Request) -> web.StreamResponse:
        run_id = _run(request)
        await self._ledger.status(run_id)
        return await send_statuses(request, self._ledger.statuses(run_id, quiet_s=QUIET_S))

    async def groups(self, request: web.Request) -> web.Response:
        state = request.query.get("state")
        if state is not None and state not in set(GroupState):
            raise RunError(f"{state!r} is no state of a group; there are {', '.join(GroupState)}")
        limit = _number(request, "limit", USUALLY_LISTED, most=MOST_LISTED)
        offset = _number(request, "offset", 0, most=wire.LARGEST)
        found = await self._ledger.groups(
            _run(request), None if state is None else GroupState(state), limit=limit, offset=offset
        )
        return reply(request, [group_view(group) for group in found], json_by_default=True)

    async def life(self, request: web.Request) -> web.Response:
        run_id, group_id = _run(request), GroupId(request.match_info["group"])
        group, moves, sentences = await self._ledger.read(
            lambda tx: (
                tx.groups.get(run_id, group_id),
                tx.history.of_group(run_id, group_id),
                explain_group(tx, run_id, group_id),
            )
        )
        if group is None:
            raise NotFoundError(f"run {run_id}: there is no group {group_id}")
        return reply(request, life_view(group, moves, sentences), json_by_default=True)

    async def payload(self, request: web.Request) -> web.Response:
        run_id, group_id = _run(request), GroupId(request.match_info["group"])
        await self._ledger.status(run_id)
        found = await self._ledger.read(lambda tx: tx.payloads.get(run_id, group_id))
        if found is None:
            raise NotFoundError(f"run {run_id}: there is no payload of group {group_id}, or not any more")
        return web.Response(body=found, content_type="application/octet-stream")

    async def manifest(self, request: web.Request) -> web.Response:
        run_id, step = _run(request), _whole(request.match_info["step"], "step", most=wire.LARGEST)
        found = await self._ledger.batch_manifest(run_id, step)
        if found is None:
            raise NotFoundError(f"run {run_id}: batch {step} is not decided")
        return reply(request, found, json_by_default=True)

    async def publications(self, request: web.Request) -> web.Response:
        found = await self._ledger.publications(_run(request))
        return reply(request, [record.contract for record in found], json_by_default=True)

    async def producers(self, request: web.Request) -> web.Response:
        found = await self._ledger.producers(_run(request))
        return reply(request, [producer_view(producer) for producer in found], json_by_default=True)

    # ------------------------------------------------------------------ runs and producers

    async def outcomes(self, request: web.Request) -> web.Response:
        page = await self._ledger.outcomes(
            _run(request),
            after=_number(request, "from", 0, most=wire.LARGEST) - 1,
            limit=_number(request, "limit", MOST_LISTED, most=MOST_LISTED),
        )
        return reply(request, page, json_by_default=True)

    async def create_run(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.CreateRun)
        await self._ledger.create_run(_run(request), asked.settings)
        return reply(request, wire.Empty())

    async def register_producer(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.RegisterProducer)
        name = request.match_info["producer"]
        record = await self._ledger.register_producer(
            _run(request), name, weight=asked.weight, min_share=asked.min_share
        )
        return reply(request, producer_view(record))

    async def join(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Join)
        owner = await self._ledger.join(_run(request), asked.owner_name, nonce=asked.nonce)
        return reply(request, wire.Joined(owner=owner))

    async def open(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Open)
        answer = await self._ledger.open(
            _run(request),
            OwnerId(asked.owner),
            asked.draws,
            limit=asked.limit,
            wait_s=min(asked.wait_s, wire.MOST_WAIT_S),
            request_id=asked.request_id,
        )
        return reply(request, answer)

    async def heartbeat(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Heartbeat)
        await self._ledger.heartbeat(_run(request), OwnerId(asked.owner))
        return reply(request, wire.Empty())

    async def submit(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Submit)
        return reply(request, await self._submitting.one(_run(request), asked))

    async def submit_many(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.SubmitMany)
        return reply(request, await self._submitting.many(_run(request), asked))

    def hot_routes(self, keys: Keys) -> Sequence[HotRoute]:
        return self._submitting.hot_routes(keys, clock=self._clock, numbers=self._numbers, body_s=self._body_s)

    async def close(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Close)
        receipt = await self._ledger.close(
            _run(request), GroupId(asked.group_id), drop_reason(asked.reason), outcome=asked.outcome
        )
        return reply(request, wire.Receipted(receipt=receipt))

    async def release(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Release)
        await self._ledger.release(_run(request), GroupId(asked.group_id), attempt=asked.attempt, cause=asked.cause)
        return reply(request, wire.Empty())

    async def exhausted(self, request: web.Request) -> web.Response:
        await self.bodies.read(request, wire.Empty)
        await self._ledger.exhausted(_run(request))
        return reply(request, wire.Empty())

    # ------------------------------------------------------------------ the trainer

    async def take_role(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.TakeRole)
        return reply(request, await self._ledger.take_role(_run(request), restored_step=asked.restored_step))

    async def batch(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Batch)
        decided = await self._ledger.decide(
            _run(request), asked.step, epoch=asked.epoch, wait_s=min(asked.wait_s, wire.MOST_WAIT_S)
        )
        if isinstance(decided, BatchManifest):
            return reply(request, wire.BatchReply(manifest=decided))
        return reply(request, wire.BatchReply(end=decided))

    async def payloads(self, request: web.Request) -> web.StreamResponse:
        asked = await self.bodies.read(request, wire.Payloads)
        run_id = _run(request)
        decided = await self._ledger.decide(run_id, asked.step, epoch=asked.epoch, wait_s=0.0)
        if not isinstance(decided, BatchManifest):
            raise RunError(
                f"run {run_id}: batch {asked.step} is not decided, so it has no payloads; ask for the batch first"
            )
        return await send_frames(request, self._ledger.payloads(run_id, decided))

    async def acknowledge(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Acknowledge)
        receipt = await self._ledger.acknowledge(_run(request), asked.step, asked.weights_digest, epoch=asked.epoch)
        return reply(request, wire.Acknowledged(receipt=receipt))

    async def register(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Register)
        answer = await self._ledger.register(_run(request), asked.step, asked.weights_digest, epoch=asked.epoch)
        return reply(request, answer)

    async def confirm(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Confirm)
        await self._ledger.confirm(_run(request), asked.publication, epoch=asked.epoch)
        return reply(request, wire.Empty())

    async def checkpointed(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Checkpointed)
        await self._ledger.checkpointed(_run(request), asked.step, oldest_kept=asked.oldest_kept, epoch=asked.epoch)
        return reply(request, wire.Empty())

    async def finish(self, request: web.Request) -> web.Response:
        asked = await self.bodies.read(request, wire.Finish)
        await self._ledger.finish(_run(request), asked.reason, epoch=asked.epoch)
        return reply(request, wire.Empty())


def _run(request: web.Request) -> RunId:
    run = request.match_info["run"]
    if "\x00" in run or len(run) > 128:
        raise NotFoundError("the ledger has no run of that name")
    return RunId(run)


def _number(request: web.Request, name: str, usual: int, *, most: int) -> int:
    told = request.query.get(name)
    return usual if told is None else _whole(told, name, most=most)


def _whole(told: str, name: str, *, most: int) -> int:
    if not (told.isascii() and told.isdigit()) or len(told) > 16 or int(told) > most:
        raise RunError(f"{name} is {told[:40]!r}; it must be a whole number from 0 to {most}")
    return int(told)
