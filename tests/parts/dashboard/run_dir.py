"""Writes a run directory with metrics and spans of a trainer, a policy server and a dispatcher."""

import json
import math
from pathlib import Path
from typing import Any

from rollbook.telemetry.spans import SpanRecorder

BEGIN = 1_700_000_000.0


def trainer_row(step: int, **values: Any) -> dict[str, Any]:
    """One row of the trainer: 0.25 s of waiting and 0.75 s of training."""
    return {
        "time": BEGIN + step,
        "process": "trainer",
        "step": step,
        "rollout/reward": step / 100,
        "rollout/accuracy": min(1.0, 0.2 + step / 100),
        "async/version_offset_max": min(2.0, step - 1.0),
        "async/version_offset_mean": min(1.5, step - 1.0),
        "perf/sample_wait_time": 0.25,
        "perf/train_time": 0.75,
        "perf/step_time": 1.0,
        "train/tokens": 100.0,
        "train/grad_norm": None,
        "train/entropy": 2.0 - step / 100,
        "train/ppo_kl": 0.0,
        "train/mean_kl": 0.001,
        "rollout/response_len": 10.0 + step,
        "rollout/truncated_ratio": 0.1,
        **values,
    }


def append_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_run(run_dir: Path, *, steps: int) -> Path:
    """Metrics and spans of `steps` steps."""
    append_rows(run_dir / "metrics.jsonl", *(trainer_row(step) for step in range(1, steps + 1)))
    append_rows(run_dir / "metrics.jsonl", {"time": BEGIN + steps, "process": "rollout", "async/in_flight": 12.0})
    trainer = SpanRecorder("trainer", run_dir / "spans" / "trainer.jsonl")
    policy = SpanRecorder("policy-0", run_dir / "spans" / "policy-0.jsonl")
    rollout = SpanRecorder("rollout", run_dir / "spans" / "rollout.jsonl")
    for step in range(steps):
        at = BEGIN + step
        trainer.record("trainer.wait_batch", at, at + 0.25, step=step + 1)
        trainer.record("trainer.train", at + 0.25, at + 0.9, step=step + 1)
        trainer.record("trainer.publish", at + 0.9, at + 1.0, step=step + 1)
        for burst in range(8):
            start = at + burst / 8
            policy.record("policy.generate", start, start + 0.05 + 0.06 * abs(math.sin(step + burst)))
        rollout.record("rollout.group", at, at + 1.5 + math.sin(step / 9))
    for recorder in (trainer, policy, rollout):
        recorder.close()
    return run_dir
