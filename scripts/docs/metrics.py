"""Prints docs/metrics.md from the tables of metrics: `python -m scripts.docs.metrics`."""

import sys
from collections.abc import Iterable

from rollbook.rollout.metrics import ROLLOUT_METRICS
from rollbook.run.processes.evaluations.evaluation import EVALUATION_METRICS
from rollbook.telemetry.metrics import Metric
from rollbook.trainer.metrics import TRAINER_METRICS

HEAD = """# Metrics

Each process appends rows to `metrics.jsonl` of the run directory. A row has every metric of its table, and null where nothing was
measured. `telemetry.sinks` sends the same rows elsewhere. This page is generated from the tables (`make docs`).
"""

TABLES = {
    "The trainer, once per step": TRAINER_METRICS,
    "The dispatcher, every few seconds": ROLLOUT_METRICS,
    "Evaluations during the run": EVALUATION_METRICS,
}


def reference() -> str:
    return "\n".join([HEAD, *(_section(title, table) for title, table in TABLES.items())])


def _section(title: str, table: Iterable[Metric]) -> str:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in table]
    return "\n".join([f"## {title}\n", "| metric | unit | meaning |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(reference())
