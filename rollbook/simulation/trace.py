"""Reads what a run recorded about time: its spans and metrics. The run may be finished or running."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import UsageError
from rollbook.contracts.group import DropKind, SampleOutcome
from rollbook.simulation.setting import ConfiguredRun
from rollbook.telemetry.cpu_time import CPU_SPAN
from rollbook.telemetry.intervals import Intervals
from rollbook.telemetry.json_tail import FolderTail
from rollbook.telemetry.metrics import read_metrics
from rollbook.telemetry.spans import Span, span_of

MIN_EPISODES, MIN_STEPS = 8, 2
DROPPED_AT_END = {DropKind.FILTERED.value, DropKind.INVALID.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedEpisode:
    task_id: str
    group_id: str
    start: float
    end: float
    requests: tuple[tuple[float, float], ...]
    """Start and end of each request to the policy."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    step: int
    start: float
    end: float
    samples: int
    tokens: int
    """Trainable tokens, masked ones included."""
    computed_samples: int
    """Those with a token that is not masked. The others are not computed."""
    computed_tokens: int
    """Trainable tokens of the computed samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCpu:
    """What the processes of a run on one machine did with its cores."""

    cores: float
    """Those that other programs left for the run."""
    used: Mapping[str, float]
    """Mean number of cores that the processes of a role used."""
    waited: Mapping[str, float]
    """Mean number of their threads that could have run but had no core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The steady part of one run: its start is left out."""

    path: Path
    run: ConfiguredRun
    episodes: tuple[TracedEpisode, ...]
    steps: tuple[TracedStep, ...]
    requests: Intervals
    """Every request to the policy of the whole run, for the load at a moment."""
    training: Intervals
    groups_by_task: Mapping[str, int]
    dropped_by_task: Mapping[str, int]
    """Groups that were filtered or invalid."""
    settling: Intervals
    """From the end of each training step until its publication is confirmed."""
    open_s: float
    submit_s: float
    fetch_s: float
    between_steps_s: float
    cpu: TracedCpu | None = None
    """None: not recorded, or the run had several machines."""

    @property
    def step_times(self) -> Intervals:
        return Intervals(_array(step.start for step in self.steps), _array(step.end for step in self.steps))

    def share_with_requests(self, periods: Intervals) -> NDArray[np.float64]:
        """The share of each period in which at least one request ran."""
        return np.clip(self.requests.union().concurrency_during(periods), 0.0, 1.0)

    def share_with_training(self, periods: Intervals) -> NDArray[np.float64]:
        return np.clip(self.training.union().concurrency_during(periods), 0.0, 1.0)


def read_trace(path: Path, run: ConfiguredRun, samples: Mapping[str, Sequence[SampleOutcome]]) -> Trace:
    """Read the spans and metrics of a run directory. Raises `UsageError` if the run has recorded too little.

    `samples`: those that the ledger stored for each draw, by the time at which they ended.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    for row in FolderTail(path / "spans").poll():
        if (span := span_of(row)) is not None:
            spans[span.name].append(span)
    metrics = {
        int(row["step"]): row
        for row in read_metrics(path / "metrics.jsonl", process="trainer")
        if row.get("step") is not None and not row.get("replay")
    }
    steps = _steps(spans["trainer.train"], metrics)
    # The first steps wait for processes that start, and compile or allocate.
    left_out = min(2, len(steps) // 3)
    since = steps[left_out - 1].end if left_out else 0.0
    whole = list(_episodes(spans["rollout.episode"], samples))
    episodes = tuple(one for one in whole if one.start >= since)
    if len(episodes) < MIN_EPISODES or len(steps) - left_out < MIN_STEPS:
        raise UsageError(
            f"{path} cannot be used as a trace: it has {len(episodes)} finished episodes and {max(0, len(steps) - left_out)} "
            f"training steps after its start; at least {MIN_EPISODES} and {MIN_STEPS} are needed. Let it run longer"
        )
    requests = [request for one in whole for request in one.requests]
    groups = [span for span in spans["rollout.group"] if span.start >= since]
    by_task, dropped = _count_groups(groups)
    open_s, submit_s = _group_overheads(groups, spans["rollout.episode"])
    return Trace(
        path=path,
        run=run,
        episodes=episodes,
        steps=tuple(steps[left_out:]),
        requests=Intervals(_array(start for start, _ in requests), _array(end for _, end in requests)),
        training=_intervals(spans["trainer.train"]),
        groups_by_task=by_task,
        dropped_by_task=dropped,
        open_s=open_s,
        submit_s=submit_s,
        settling=_settling(spans, since),
        fetch_s=_fetch_time(spans, since),
        between_steps_s=_time_between_steps(spans, since),
        cpu=traced_cpu([span for span in spans[CPU_SPAN] if span.start >= since]),
    )


def _array(values: Iterable[float]) -> NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)


def _intervals(spans: list[Span]) -> Intervals:
    return Intervals(_array(span.start for span in spans), _array(span.end for span in spans))


def _episodes(spans: list[Span], samples: Mapping[str, Sequence[SampleOutcome]]) -> Iterator[TracedEpisode]:
    """The scored episodes. The spans have the times of their requests, the ledger has their tokens."""
    by_group: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.fields.get("turns") and span.fields.get("cause") is None:
            by_group[str(span.fields["group_id"])].append(span)
    known = [sample.tokens / max(1, sample.turns) for group in samples.values() for sample in group]
    tokens_per_turn = sum(known) / len(known) if known else 1.0
    for name, members in by_group.items():
        members.sort(key=lambda span: span.end)
        stored = samples.get(name, [])
        for number, span in enumerate(members):
            turns = tuple((float(start), float(end)) for start, end in span.fields["turns"])
            is_matched = len(stored) == len(members)
            yield TracedEpisode(
                task_id=name.rpartition("@")[0],
                group_id=name,
                start=span.start,
                end=span.end,
                requests=turns,
                tokens=max(1, stored[number].tokens if is_matched else round(tokens_per_turn * len(turns))),
            )


def _steps(spans: list[Span], metrics: Mapping[int, Mapping[str, Any]]) -> list[TracedStep]:
    found = []
    for span in spans:
        step = int(span.fields["step"])
        row = metrics.get(step)
        if row is not None and row.get("rollout/samples"):
            samples, masked = int(row["rollout/samples"]), int(row.get("async/masked_tokens") or 0)
            tokens = int(row.get("train/tokens") or 0) + masked
            skipped = int(row.get("async/masked_samples") or 0)
            found.append(
                TracedStep(
                    step=step,
                    start=span.start,
                    end=span.end,
                    samples=samples,
                    tokens=tokens,
                    computed_samples=samples - skipped,
                    # The tokens of skipped samples are not recorded: as many as an average sample has.
                    computed_tokens=tokens - min(masked, round(skipped * tokens / samples)),
                )
            )
    return sorted(found, key=lambda one: one.start)


def _count_groups(groups: list[Span]) -> tuple[dict[str, int], dict[str, int]]:
    every: dict[str, int] = defaultdict(int)
    dropped: dict[str, int] = defaultdict(int)
    for span in groups:
        task = str(span.fields["group_id"]).rpartition("@")[0]
        every[task] += 1
        dropped[task] += span.fields.get("drop") in DROPPED_AT_END
    return every, dropped


def _group_overheads(groups: list[Span], episodes: list[Span]) -> tuple[float, float]:
    """Median seconds before the first episode of a group starts, and after its last one has ended."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for span in episodes:
        name = str(span.fields["group_id"])
        first[name] = min(span.start, first.get(name, span.start))
        last[name] = max(span.end, last.get(name, span.end))
    known = [(span, str(span.fields["group_id"])) for span in groups if str(span.fields["group_id"]) in first]
    opened = [first[name] - span.start for span, name in known]
    submitted = [span.end - last[name] for span, name in known]
    return _median(opened), _median(submitted)


def _by_step(spans: list[Span]) -> dict[int, Span]:
    return {int(span.fields["step"]): span for span in spans if "step" in span.fields}


def _settling(spans: Mapping[str, list[Span]], since: float) -> Intervals:
    published = _by_step(spans["trainer.publish"])
    found = [
        (trained.end, max(trained.end, published[step].end))
        for step, trained in _by_step(spans["trainer.train"]).items()
        if trained.start >= since and step in published
    ]
    return Intervals(_array(start for start, _ in found), _array(end for _, end in found))


def _fetch_time(spans: Mapping[str, list[Span]], since: float) -> float:
    """Seconds from the decision of a batch to its arrival: after its last group, or after the request if all were there."""
    arrivals = np.sort(_array(span.end for span in spans["rollout.group"]))
    found = []
    for span in spans["trainer.wait_batch"]:
        if span.start >= since and len(arrivals):
            before = int(np.searchsorted(arrivals, span.end))
            decided = max(span.start, float(arrivals[before - 1])) if before else span.start
            found.append(span.end - decided)
    # A low quantile: the last arrival is not always in the batch.
    return float(np.quantile(found, 0.25)) if found else 0.0


def _time_between_steps(spans: Mapping[str, list[Span]], since: float) -> float:
    """Median seconds from the moment when the trainer could continue until it trains."""
    trained, waited = _by_step(spans["trainer.train"]), _by_step(spans["trainer.wait_batch"])
    published = _by_step(spans["trainer.publish"])
    found = []
    for step, span in trained.items():
        previous = trained.get(step - 1)
        if previous is not None and step in waited and span.start >= since:
            settled = published[step - 2].end if step - 2 in published else previous.end
            found.append(span.start - max(previous.end, waited[step].end, settled))
    return _median(found)


def traced_cpu(spans: Sequence[Span]) -> TracedCpu | None:
    """From spans of CPU time. None without any, or if they are of several machines."""
    if len({span.fields["node"] for span in spans}) != 1:
        return None
    by_process: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_process[str(span.fields["role"]), span.process].append(span)
    used: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for (role, _), found in by_process.items():
        seconds = sum(span.seconds for span in found)
        used[role] += sum(float(span.fields["used_s"]) for span in found) / seconds
        waited[role] += sum(float(span.fields["waited_s"]) for span in found) / seconds
    cores = min(float(span.fields["cores"]) for span in spans)
    busy = sum(float(span.fields["busy_s"]) for span in spans) / sum(span.seconds for span in spans)
    of_run = sum(used.values())
    return TracedCpu(cores=cores - min(max(0.0, busy - of_run), max(0.0, cores - of_run)), used=used, waited=waited)


def _median(values: list[float]) -> float:
    return max(0.0, float(np.median(values))) if values else 0.0
