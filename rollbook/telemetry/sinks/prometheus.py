"""Serves the latest value of every metric for Prometheus at `/metrics`. Needs no library."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.prometheus import CONTENT_TYPE, Family, Kind, Sample, exposition
from rollbook.telemetry.sinks.sink import Sink


class PrometheusSink(Sink):
    def __init__(self, host: str, port: int, *, run_name: str) -> None:
        self._run_name = run_name
        self._latest: dict[str, Sample] = {}
        self._lock = threading.Lock()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = sink.text().encode() if is_known else b"the metrics are at /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise OSError(
                f"telemetry.prometheus_port {port} on {host} cannot be used ({error}); choose another one"
            ) from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        labels = {"run": self._run_name, "process": process}
        with self._lock:
            self._latest.update({metric_name(name): Sample(value, labels) for name, value in values.items()})
            self._latest["rollbook_trainer_step"] = Sample(step, {"run": self._run_name, "process": "trainer"})

    def text(self) -> str:
        with self._lock:
            latest = sorted(self._latest.items())
        return exposition(Family(name, "the latest value", Kind.GAUGE, [sample]) for name, sample in latest)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def metric_name(name: str) -> str:
    """`train/loss` is `rollbook_train_loss`."""
    return "rollbook_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> PrometheusSink:
    return PrometheusSink(config.prometheus_host, config.prometheus_port, run_name=run_name)
