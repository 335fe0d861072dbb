"""The criteria of the two phases of the proof, as pure functions of recorded metrics."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]

MAX_MEAN_KL = 0.05
"""KL divergence from the policy that sampled, in nats per token. One version of lag moves the policy by much less."""
NO_DRIFT = 1e-6
"""With one minibatch the trained policy is the one at the start of the step, so only rounding is left."""

SAME_BITS = "the same bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The recorded results of one run."""

    trainer: Rows
    rollout: Rows
    exit_code: int
    audit_ok: bool
    checkpoints: tuple[int, ...]
    checkpoint_fault: str | None
    """Why the last checkpoint cannot be used; None if it can."""
    checkpoint_every: int
    ended: str
    """Why the ledger ended the run."""
    replay: str | None = None
    """`SAME_BITS`, or what a replay of all steps found instead; None: there was no replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    phase: int
    name: str
    value: str
    demand: str
    ok: bool

    def line(self) -> str:
        return f"phase {self.phase}  {'pass' if self.ok else 'FAIL'}  {self.name:<26} {self.value:<28} required: {self.demand}"


def values(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


def reward_trend(rollout: Rows) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of all episodes, trained or filtered."""
    ticks = [
        (row["rollout/raw_reward"], row["rollout/groups_finished"])
        for row in rollout
        if row.get("rollout/raw_reward") is not None and row.get("rollout/groups_finished")
    ]
    total = sum(count for _, count in ticks)
    first: list[tuple[float, float]] = []
    last: list[tuple[float, float]] = []
    seen = 0.0
    for reward, count in ticks:
        if seen < total / 4:
            first.append((reward, count))
        if seen + count > 3 * total / 4:
            last.append((reward, count))
        seen += count
    return _weighted(first), _weighted(last)


def judge_first(phase: Phase, *, max_head_offpolicy_versions: int, is_trend_required: bool) -> list[Criterion]:
    """One minibatch per batch, staleness bound 1."""
    kl = max(map(abs, values(phase.trainer, "train/ppo_kl")), default=math.nan)
    mean_kl = _mean(values(phase.trainer, "train/mean_kl"))
    offset = max(values(phase.trainer, "async/version_offset_max"), default=math.nan)
    waits = [*values(phase.trainer, "perf/sample_wait_time"), *values(phase.trainer, "perf/wait_time_ratio")]
    steps = len(phase.trainer)
    return [
        Criterion(phase=1, name="train/ppo_kl", value=f"at most {kl:.2e}", demand="about 0", ok=kl <= NO_DRIFT),
        Criterion(
            phase=1,
            name="train/mean_kl",
            value=f"mean {mean_kl:.2e}",
            demand=f"at most {MAX_MEAN_KL:g}",
            ok=abs(mean_kl) <= MAX_MEAN_KL,
        ),
        Criterion(
            phase=1,
            name="async/version_offset_max",
            value=f"{offset:g}",
            demand=f"≤ {max_head_offpolicy_versions}",
            ok=offset <= max_head_offpolicy_versions,
        ),
        Criterion(
            phase=1,
            name="wait metrics",
            value=f"{len(waits)} values, mean ratio {_mean(values(phase.trainer, 'perf/wait_time_ratio')):.3f}",
            demand="finite in every step",
            ok=len(waits) == 2 * steps and all(map(math.isfinite, waits)),
        ),
        _reward(1, phase, is_trend_required=is_trend_required),
        _clean_end(1, phase),
        _usable(1, phase),
        *_replay(1, phase),
    ]


def judge_second(
    phase: Phase, first: Phase, *, max_head_offpolicy_versions: int, minibatches: int, is_short: bool
) -> list[Criterion]:
    """Several minibatches per batch, staleness bound 2."""
    kl = _mean(values(phase.trainer, "train/ppo_kl"))
    clipped = max(values(phase.trainer, "train/ppo_clip_frac"), default=math.nan)
    offset = max(values(phase.trainer, "async/version_offset_max"), default=math.nan)
    wait, wait_first = (_mean(values(p.trainer, "perf/wait_time_ratio")) for p in (phase, first))
    steps = sum(values(phase.trainer, "train/optimizer_steps"))
    batches = len(phase.trainer)
    return [
        Criterion(phase=2, name="train/ppo_kl", value=f"mean {kl:.2e}", demand="> 0", ok=kl > NO_DRIFT),
        Criterion(
            phase=2,
            name="train/ppo_clip_frac",
            value=f"at most {clipped:.4f}",
            demand="> 0" if not is_short else "(not required in a short run)",
            ok=clipped > 0 or is_short,
        ),
        Criterion(
            phase=2,
            name="async/version_offset_max",
            value=f"{offset:g}",
            demand=f"≤ {max_head_offpolicy_versions}",
            ok=offset <= max_head_offpolicy_versions,
        ),
        Criterion(
            phase=2,
            name="perf/wait_time_ratio",
            value=f"{wait:.3f} after {wait_first:.3f}",
            demand="≤ phase 1's" if not is_short else "(not required in a short run)",
            ok=wait <= wait_first or is_short,
        ),
        Criterion(
            phase=2,
            name="train/optimizer_steps",
            value=f"{steps:g} in {batches} batches",
            demand=f"about {minibatches} × batches",
            ok=0.95 * minibatches * batches <= steps <= minibatches * batches,
        ),
        Criterion(
            phase=2,
            name="checkpoint cadence",
            value=" ".join(map(str, phase.checkpoints)),
            demand=f"every {phase.checkpoint_every} batches as in phase 1, and the last batch",
            ok=all(_has_cadence(p) for p in (phase, first)) and phase.checkpoint_every == first.checkpoint_every,
        ),
        _reward(2, phase, is_trend_required=not is_short),
        _clean_end(2, phase),
        _usable(2, phase),
        *_replay(2, phase),
    ]


def _clean_end(number: int, phase: Phase) -> Criterion:
    audit = "ok" if phase.audit_ok else "violated"
    return Criterion(
        phase=number,
        name="end",
        value=f"exit code {phase.exit_code}, audit {audit}, {phase.ended}",
        demand="clean: 0, ok, end_of_data",
        ok=phase.exit_code == 0 and phase.audit_ok and phase.ended == "end_of_data",
    )


def _reward(number: int, phase: Phase, *, is_trend_required: bool) -> Criterion:
    before, after = reward_trend(phase.rollout)
    return Criterion(
        phase=number,
        name="reward",
        value=f"{before:.3f} → {after:.3f}",
        demand="trends up" if is_trend_required else "(not required in a short run)",
        ok=after > before or not is_trend_required,
    )


def _has_cadence(phase: Phase) -> bool:
    """A checkpoint every `checkpoint_every` batches, and one after the last batch."""
    last = len(phase.trainer)
    expected = sorted({*range(phase.checkpoint_every, last + 1, phase.checkpoint_every), last})
    return list(phase.checkpoints) == expected


def _replay(number: int, phase: Phase) -> list[Criterion]:
    if phase.replay is None:
        return []
    ok = phase.replay == SAME_BITS
    return [Criterion(phase=number, name="replay --verify", value=phase.replay, demand=SAME_BITS, ok=ok)]


def _usable(number: int, phase: Phase) -> Criterion:
    return Criterion(
        phase=number,
        name="final checkpoint",
        value=phase.checkpoint_fault or f"step {max(phase.checkpoints, default=0)} loads and answers",
        demand="usable",
        ok=phase.checkpoint_fault is None and bool(phase.checkpoints),
    )


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan


def _weighted(pairs: Sequence[tuple[float, float]]) -> float:
    count = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / count if count else math.nan
