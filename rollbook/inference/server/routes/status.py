"""What the server says of itself: GET /health, /ping, /version, /v1/models, /metrics."""

from aiohttp import web

from rollbook import __version__
from rollbook.inference.server.routes.replies import json_response
from rollbook.inference.server.service import PolicyService, model_card
from rollbook.inference.wire.completions import Health
from rollbook.inference.wire.weights import WeightInfo
from rollbook.telemetry.prometheus import CONTENT_TYPE, Family, Kind, Sample, exposition


class TellingRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service

    async def health(self, _request: web.Request) -> web.Response:
        engine = self._service.engine
        stats, weights = engine.stats(), WeightInfo.of(engine.publication)
        return json_response(
            Health(
                status="draining" if self._service.is_draining else "ok",
                publication=weights.publication,
                step=weights.step,
                epoch=weights.epoch,
                digest=weights.digest,
                running=stats.running,
                queued=stats.queued,
                is_paused=engine.is_paused,
                is_draining=self._service.is_draining,
            )
        )

    async def version(self, _request: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def models(self, _request: web.Request) -> web.Response:
        cards = [model_card(self._service, name) for name in self._service.served_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return json_response(model_card(self._service, self._service.model(name)))

    async def drain(self, _request: web.Request) -> web.Response:
        """Begin nothing more; what runs is finished. For an operator who takes this replica out of service."""
        self._service.is_draining = True
        return json_response({"status": "draining"})

    async def metrics(self, _request: web.Request) -> web.Response:
        response = web.Response(body=exposition(_families(self._service)).encode())
        response.headers["Content-Type"] = CONTENT_TYPE
        return response


def _families(service: PolicyService) -> list[Family]:
    engine = service.engine
    stats, publication = engine.stats(), engine.publication
    rows: list[tuple[str, str, Kind, float]] = [
        ("requests_running", "requests being decoded", Kind.GAUGE, stats.running),
        ("requests_queued", "requests that wait for a slot", Kind.GAUGE, stats.queued),
        ("requests_total", "requests answered", Kind.COUNTER, stats.requests),
        ("tokens_total", "tokens sampled", Kind.COUNTER, stats.tokens),
        ("cached_prompt_tokens_total", "prompt tokens taken from the prefix cache", Kind.COUNTER, stats.cached_tokens),
        ("steps_total", "rounds of admitting, prefilling and decoding", Kind.COUNTER, stats.steps),
        ("forwards_total", "forwards of the model", Kind.COUNTER, stats.forwards),
        ("busy_seconds_total", "seconds spent in steps", Kind.COUNTER, stats.busy_s),
        ("paused", "1 while paused", Kind.GAUGE, float(engine.is_paused)),
        ("draining", "1 once it begins nothing more", Kind.GAUGE, float(service.is_draining)),
        ("publication", "id of the weights in use, -1 for none", Kind.GAUGE, publication.id if publication else -1),
        ("policy_step", "training step of the weights in use", Kind.GAUGE, publication.step if publication else -1),
    ]
    return [Family(f"rollbook_policy_{name}", meaning, kind, [Sample(value)]) for name, meaning, kind, value in rows]
