"""Serves the latest value of every metric for Prometheus at `/metrics`. Needs no optional library."""

import re
import threading
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web

from rollbook.access.server import serve_app
from rollbook.access.tokens import Secret, bearer_token, read_or_create_token
from rollbook.concurrency.blocking import LoopThread
from rollbook.concurrency.sockets import listening_socket
from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.prometheus import Family, Kind, Sample, metrics_response
from rollbook.telemetry.sinks.sink import Sink


class LatestValues:
    """The latest value of every metric of a run. Written by one thread and served by another."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._samples: dict[str, Sample] = {}
        self._lock = threading.Lock()

    def update(self, values: dict[str, float], *, process: str, step: int) -> None:
        labels = {"run": self._run_name, "process": process}
        with self._lock:
            self._samples.update({metric_name(name): Sample(value, labels) for name, value in values.items()})
            self._samples["rollbook_trainer_step"] = Sample(step, {"run": self._run_name, "process": "trainer"})

    def families(self) -> list[Family]:
        with self._lock:
            samples = sorted(self._samples.items())
        return [Family(name, "the latest value", Kind.GAUGE, [sample]) for name, sample in samples]


def metrics_app(values: LatestValues, *, token: str | None = None) -> web.Application:
    """With a token, only requests that send it are answered."""
    secret = None if token is None else Secret(token)

    async def metrics(request: web.Request) -> web.Response:
        if secret is not None and not secret.matches(bearer_token(request.headers.get(hdrs.AUTHORIZATION))):
            message = "send the token in telemetry.prometheus_token_file: 'Authorization: Bearer …'\n"
            return web.Response(text=message, status=401, headers={hdrs.WWW_AUTHENTICATE: "Bearer"})
        body, headers = metrics_response(values.families(), request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


class PrometheusSink(Sink):
    """The server runs in its own thread, with its own event loop, until the sink is closed."""

    def __init__(self, host: str, port: int, *, run_name: str, token: str | None = None) -> None:
        self._values = LatestValues(run_name)
        try:
            sock = listening_socket(host, port)
        except OSError as error:
            raise OSError(
                f"telemetry.prometheus_port {port} on {host} cannot be used ({error}); choose another one"
            ) from error
        self.port = int(sock.getsockname()[1])
        self._loop = LoopThread("prometheus")
        self._loop.enter(serve_app(metrics_app(self._values, token=token), sock))

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        self._values.update(values, process=process, step=step)

    def close(self) -> None:
        self._loop.stop()


def metric_name(name: str) -> str:
    """`train/loss` is `rollbook_train_loss`."""
    return "rollbook_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> PrometheusSink:
    file = config.prometheus_token_file
    token = None if file is None else read_or_create_token(directory / file.expanduser())
    return PrometheusSink(config.prometheus_host, config.prometheus_port, run_name=run_name, token=token)
