"""Engine status (/health, /version, /v1/models, /metrics, /is_paused) and control (/pause, /resume, /abort_requests, /drain)."""

from collections.abc import Mapping

from aiohttp import web

from rollbook import __version__
from rollbook.contracts.decoding import json_decoder
from rollbook.inference.pause import PauseMode
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.routes.responses import json_response
from rollbook.inference.server.service import PolicyService
from rollbook.inference.wire.completions import EngineHealth
from rollbook.inference.wire.weights import AbortBody, WeightInfo
from rollbook.telemetry.prometheus import Family, Kind, Sample, metrics_response


class EngineRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._engine = service.engine

    async def health(self, _request: web.Request) -> web.Response:
        stats, weights = self._engine.stats(), WeightInfo.of(self._engine.publication)
        return json_response(
            EngineHealth(
                status="draining" if self._service.is_draining else "ok",
                publication=weights.publication,
                step=weights.step,
                epoch=weights.epoch,
                digest=weights.digest,
                running=stats.running,
                queued=stats.queued,
                is_paused=self._engine.is_paused,
                is_draining=self._service.is_draining,
            )
        )

    async def version(self, _request: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def models(self, _request: web.Request) -> web.Response:
        cards = [self._model_card(name) for name in self._service.served_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        return json_response(self._model_card(self._service.resolve_model(request.match_info["name"])))

    async def metrics(self, request: web.Request) -> web.Response:
        body, headers = metrics_response(_families(self._service), request.headers.get("Accept"))
        return web.Response(body=body, headers=headers)

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", PauseMode.ABORT.value)
        if mode not in set(PauseMode):
            raise BadRequestError(f"mode: {mode!r} is not one of keep, wait, abort", param="mode")
        await self._engine.pause(PauseMode(mode))
        return json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        await self._engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _request: web.Request) -> web.Response:
        return json_response({"is_paused": self._engine.is_paused})

    async def abort(self, request: web.Request) -> web.Response:
        body = json_decoder(AbortBody).decode_body(await request.read())
        return json_response({"status": "aborted", "aborted": self._service.abort(body.request_ids)})

    async def drain(self, _request: web.Request) -> web.Response:
        """Start no new requests; running ones finish. For an operator who takes this replica out of service."""
        self._service.is_draining = True
        return json_response({"status": "draining"})

    def _model_card(self, name: str) -> Mapping[str, object]:
        names = self._service.model_names
        return {
            "id": name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "rollbook",
            "parent": None if name in names else names[0],
            "max_model_len": self._engine.max_model_len,
            "vocab_size": self._engine.vocab_size,
        }


def _families(service: PolicyService) -> list[Family]:
    engine = service.engine
    stats, publication = engine.stats(), engine.publication
    rows: list[tuple[str, str, Kind, float]] = [
        ("requests_running", "requests being decoded", Kind.GAUGE, stats.running),
        ("requests_queued", "requests waiting for a slot", Kind.GAUGE, stats.queued),
        ("requests_total", "completed requests", Kind.COUNTER, stats.requests),
        ("tokens_total", "sampled tokens", Kind.COUNTER, stats.tokens),
        ("cached_prompt_tokens_total", "prompt tokens taken from the prefix cache", Kind.COUNTER, stats.cached_tokens),
        ("drafted_tokens_total", "tokens computed ahead of sampling", Kind.COUNTER, stats.drafted_tokens),
        ("accepted_tokens_total", "drafted tokens that were sampled", Kind.COUNTER, stats.accepted_tokens),
        ("cache_shrinks_total", "times the cache shrank for lack of memory", Kind.COUNTER, stats.cache_shrinks),
        ("steps_total", "engine steps (admission, prefill and one decode step)", Kind.COUNTER, stats.steps),
        ("forwards_total", "forward passes of the model", Kind.COUNTER, stats.forwards),
        ("busy_seconds_total", "seconds spent in steps", Kind.COUNTER, stats.busy_s),
        ("paused", "1 while the engine is paused", Kind.GAUGE, float(engine.is_paused)),
        ("draining", "1 while the server is draining", Kind.GAUGE, float(service.is_draining)),
        ("publication", "id of the live weights, -1 for none", Kind.GAUGE, publication.id if publication else -1),
        ("policy_step", "training step of the live weights", Kind.GAUGE, publication.step if publication else -1),
    ]
    return [Family(f"rollbook_policy_{name}", meaning, kind, [Sample(value)]) for name, meaning, kind, value in rows]
