"""A run that `benchmarks.loop.defaults` measured: where its time and its memory went, and what kills did to it."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from benchmarks.learning.runs import LearningRun
from benchmarks.loop.observers import GpuMemory, GroupPlaces, Kills
from benchmarks.report import Figure
from rollbook.contracts.group import GroupState
from rollbook.run.resources.automatic import Resolution
from rollbook.run.resources.machine import GB
from rollbook.run.resources.memory_plan import CONTEXT_BYTES, gpu, memory_plan

FLOOR = 0.9
MEMORY_FLOOR = 0.9
"""Planned and measured memory differ by at most 10 %."""
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    run: LearningRun
    found: Resolution
    memory: GpuMemory
    groups: GroupPlaces
    kills: Kills
    replayed: tuple[int, int] = (0, 0)
    """Steps that a replay trained with the same bits, and all that it was to train."""

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The steps after the warm-up; after the first one if there are few."""
        return self.run.steps[max(1, min(WARM_UP_STEPS, len(self.run.steps) - 3)) :]

    @property
    def periods(self) -> list[float]:
        """Seconds from one step to the next, after the warm-up."""
        first = len(self.run.steps) - len(self.steady)
        return [b["time"] - a["time"] for a, b in pairwise(self.run.steps[max(0, first - 1) :])] if first else []

    @property
    def measured_bytes(self) -> dict[str, int]:
        """By process."""
        tensors = float(max(row["perf/memory_gb"] for row in self.run.steps)) * GB
        return self.memory.by_process | {"trainer": round(tensors + CONTEXT_BYTES)}

    @property
    def planned_bytes(self) -> dict[str, int]:
        """By process, without a checkpoint if there was none. A pass of the planned size is tried before the first step."""
        sizes, last = self.found.sizes, self.run.steps[-1]
        if self.found.model is None or self.found.plan is None:
            return {}
        has_checkpoint = sizes.has_gpu_checkpoint and last["step"] >= self.found.loaded.config.trainer.checkpoint_every
        return memory_plan(self.found.model, replace(sizes, has_gpu_checkpoint=has_checkpoint)).by_process(gpu(0))

    @property
    def time(self) -> dict[str, float]:
        """Where the time of a step goes, and where groups are."""
        step_s = statistics.fmean(self.periods)
        names = {
            "train": "perf/train_time",
            "wait for batch": "perf/sample_wait_time",
            "wait for publication": "perf/publish_wait_time",
            "wait for checkpoint": "perf/checkpoint_wait_time",
        }
        concurrent = {
            "digest": "perf/digest_time",
            "acknowledgement": "perf/acknowledge_time",
            "publication": "perf/weight_sync_time",
        }
        means = {
            label: statistics.fmean([row.get(metric) or 0.0 for row in self.steady])
            for label, metric in {**names, **concurrent}.items()
        }
        groups = self.groups.means()
        played = groups.get(GroupState.DISPATCHED, 0.0)
        found = {
            "step": step_s,
            **{label: means[label] for label in names},
            "other": step_s - sum(means[label] for label in names),
            **{label: means[label] for label in concurrent},
            "played": played,
            "queued": groups.get(GroupState.QUEUED, 0.0),
            "batched": groups.get(GroupState.BATCHED, 0.0),
            "play": played * step_s / self.found.loaded.config.gate.groups_per_step,
        }
        return {label: round(value, 3) for label, value in found.items()}

    def row(self) -> dict[str, Any]:
        steady, plan = self.steady, self.found.plan

        def middle(metric: str) -> float | None:
            values = [row[metric] for row in steady if row.get(metric) is not None]
            return round(statistics.median(values), 3) if values else None

        return {
            "name": self.run.name,
            "step_s": round(statistics.fmean(self.periods), 3),
            "step_s_all": [round(period, 3) for period in self.periods],
            "steps": len(self.run.steps),
            "start_s": round(self.run.start_s, 1),
            "first_step_s": round(self.run.first_step_s, 1),
            "time": self.time,
            "mfu_in_step": middle("perf/mfu"),
            "tokens_per_step": middle("rollout/response_len"),
            "trainer_tensors_gb": max((row["perf/memory_gb"] for row in self.run.steps), default=None),
            "gpu_gb": round(self.memory.total / GB, 2),
            "gpu_gb_by_process": in_gb(self.memory.by_process),
            "planned_gb": 0.0 if plan is None else round(plan.total(gpu(0)) / GB, 2),
            "planned_gb_by_process": in_gb(self.planned_bytes),
            "chosen": dict(self.found.chosen),
            "max_lag": self.run.max_lag,
            "audit_ok": self.run.audit_ok,
            "kills": self.kills.done,
            "ended_others": self.kills.others,
            "diverged_steps": self.diverged_steps,
            "trained_again": sum(bool(row.get("replay")) for row in self.run.steps),
            "replayed": self.replayed,
        }

    @property
    def diverged_steps(self) -> int:
        return round(sum(row["train/diverged_steps"] or 0 for row in self.run.steps))


def in_gb(num_bytes: Mapping[str, int]) -> dict[str, float]:
    return {name: round(number / GB, 2) for name, number in num_bytes.items()}


def kill_figures(name: str, ours: Measured) -> list[Figure]:
    kills, (same, steps) = ours.kills, ours.replayed
    same = 0 if ours.diverged_steps else same
    return [
        Figure(
            name=f"killed_{name}_others",
            ours=kills.alone,
            peer=kills.done,
            unit="kills",
            ratio=kills.alone / max(1, kills.done),
            floor=1.0,
            more={"ended_others": kills.others},
        ),
        Figure(
            name=f"killed_{name}_bits",
            ours=same,
            peer=steps,
            unit="steps",
            ratio=same / max(1, steps),
            floor=1.0,
            more={"diverged_steps": ours.diverged_steps},
        ),
    ]


def figures_of(name: str, ours: Measured, hand: Measured | None) -> list[Figure]:
    step_s = statistics.fmean(ours.periods)
    figures = []
    if hand is not None:
        peer = statistics.fmean(hand.periods)
        figures.append(
            Figure(name=f"defaults_{name}", ours=step_s, peer=peer, unit="s a step", ratio=peer / step_s, floor=FLOOR)
        )
    planned = ours.planned_bytes if ours.memory.total else {}
    for process, used in ours.measured_bytes.items():
        if process in planned:
            both = sorted((used / GB, planned[process] / GB))
            figures.append(
                Figure(
                    name=f"memory_{name}_{process}",
                    ours=used / GB,
                    peer=planned[process] / GB,
                    unit="GB",
                    ratio=both[0] / both[1],
                    floor=MEMORY_FLOOR,
                )
            )
    return figures
