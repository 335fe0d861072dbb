"""The report of a prediction, as text and as JSON: throughput, lag, bottleneck, recommended settings, and a sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.simulation.fit import Fit
from rollbook.simulation.prediction import SAME, Prediction, WhatIf, changed_sizes, ideal_samples_per_s
from rollbook.simulation.processors import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptPoint:
    overrides: tuple[str, ...]
    prediction: Prediction
    is_best: bool
    """No other point has at most the same lag and more trained tokens per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionReport:
    fit: Fit
    prediction: Prediction
    what_ifs: tuple[WhatIf, ...]
    recommended: Prediction
    extrapolations: tuple[str, ...]
    points: tuple[SweptPoint, ...] = ()

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "traces": [str(trace.path) for trace in self.fit.traces],
            "request_error": round(self.fit.request_error, 4),
            "cores": None if self.fit.durations.processors is UNLIMITED else self.fit.durations.processors.cores,
            "prediction": self.prediction.row(),
            "ideal_samples_per_s": round(ideal_samples_per_s(self.prediction.setting, self.fit.durations), 3),
            "bottleneck": bottleneck(self.prediction, self.what_ifs),
            "what_ifs": {one.text: round(one.gain, 4) for one in self.what_ifs},
            "recommended": self.recommended.row(),
            "extrapolations": list(self.extrapolations),
            "sweep": [
                {"settings": list(point.overrides), "is_best": point.is_best, **point.prediction.row()}
                for point in self.points
            ],
        }


def size_label(one: Prediction) -> str:
    rule = one.setting.rule
    return f"bound {rule.max_head_offpolicy_versions}, {rule.max_in_flight} in flight"


def report_lines(report: PredictionReport) -> Iterator[str]:
    one, rule = report.prediction, report.prediction.setting.rule
    episodes = sum(len(trace.episodes) for trace in report.fit.traces)
    steps = sum(len(trace.steps) for trace in report.fit.traces)
    runs = f"{len(report.fit.traces)} {'run' if len(report.fit.traces) == 1 else 'runs'}"
    yield (
        f"trace         {runs}, {episodes} episodes, {steps} training steps; "
        f"durations of requests are fitted within {report.fit.request_error:.0%}"
    )
    yield (
        f"setting       {rule.groups_per_step} groups a step, {size_label(one)}, policy {rule.policy}, "
        + ", ".join(
            f"{count} {noun}{'s' if count != 1 else ''}"
            for count, noun in ((one.setting.workers, "worker"), (one.setting.replicas, "replica"))
        )
        + ("" if (processors := report.fit.durations.processors) is UNLIMITED else f", {processors.cores:.3g} cores")
    )
    yield (
        f"throughput    {one.steps_per_s:.3g} steps/s ({1 / one.steps_per_s:.3g} s a step), {one.samples_per_s:.3g} samples/s, "
        f"{one.tokens_per_s:.3g} trained tokens/s"
    )
    ideal = ideal_samples_per_s(one.setting, report.fit.durations)
    yield f"ideal         {ideal:.3g} samples/s, if trainer, slots or policy servers never waited"
    shares = ", ".join(f"{lag}: {share:.0%}" for lag, share in one.lag_shares.items())
    yield f"lag           mean {one.lag_mean:.2f} ({shares} of the groups; bound {rule.max_head_offpolicy_versions})"
    yield f"idle          trainer {one.trainer_idle:.0%}, engines {one.engine_idle:.0%} of the time"
    dropped = ", ".join(f"{share:.1%} {kind}" for kind, share in one.dropped.items()) or "nothing"
    yield f"lost          {one.masked:.1%} of the tokens masked; dropped, as a rough estimate: {dropped}"
    yield f"bottleneck    {bottleneck(one, report.what_ifs)}"
    for gain in report.what_ifs:
        yield f"  what if     {gain.text}: {gain.gain:+.0%} trained tokens/s"
    yield f"recommended   {recommendation(one, report.recommended)}"
    for text in report.extrapolations:
        yield f"extrapolated  {text}"
    if report.points:
        yield ""
        yield f"{'trained tokens/s':>16} {'steps/s':>8} {'mean lag':>8} {'masked':>7} {'dropped':>7}  settings (*: on the frontier)"
        for point in sorted(report.points, key=lambda p: (p.prediction.lag_mean, -p.prediction.tokens_per_s)):
            p = point.prediction
            yield (
                f"{p.tokens_per_s:>16.4g} {p.steps_per_s:>8.3g} {p.lag_mean:>8.2f} {p.masked:>7.1%} "
                f"{sum(p.dropped.values()):>7.1%} {'*' if point.is_best else ' '} {' '.join(point.overrides)}"
            )


def bottleneck(one: Prediction, gains: Sequence[WhatIf]) -> str:
    """What limits the throughput first, in words."""
    first = gains[0]
    if first.gain < SAME:
        return "none of them alone: no change of one part gives more"
    busy = 1.0 - one.trainer_idle
    reasons = {
        "trainer": f"the trainer, which trains {busy:.0%} of the time",
        "engines": f"the policy servers: the trainer waits {one.trainer_idle:.0%} of the time, and episodes wait for tokens",
        "environment": f"the environments: the trainer waits {one.trainer_idle:.0%} of the time, and episodes wait for them",
        "cores": "the cores of the machine: its processes wait for them",
        "workers": "the worker processes: each one uses at most one core",
        "publication": "the publication of weights: the gate waits for every new version",
        "groups in flight": "the number of groups in flight: engines and trainer could do more",
        "staleness bound": "the staleness bound: the gate admits no more groups",
        "slow episodes": f"slow episodes: policy {one.setting.rule.policy} makes the trainer wait for them",
    }
    return f"{reasons[first.name]}. {first.text}: {first.gain:+.0%} trained tokens/s"


def recommendation(now: Prediction, better: Prediction) -> str:
    old, new = now.setting.rule, better.setting.rule
    if better is now:
        return "keep the settings: no other batch policy or number of groups in flight is better with this bound"
    changes = changed_sizes(now.setting, better.setting)
    if new.policy is not old.policy:
        changes.append(f'gate.batch_policy = "{new.policy}"')
    gain = better.tokens_per_s / max(now.tokens_per_s, 1e-9) - 1.0
    return (
        f"{', '.join(changes)}: {better.tokens_per_s:.3g} trained tokens/s ({gain:+.0%}), {better.steps_per_s:.3g} steps/s, "
        f"mean lag {better.lag_mean:.2f} instead of {now.lag_mean:.2f}"
    )
