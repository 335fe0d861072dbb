"""`rollbook simulate`: predicts a run with other sizes from the trace of a run."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, AsJson, Option, Overrides
from rollbook.commands.output import result, result_json, stderr_console
from rollbook.contracts.errors import UsageError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import SampleOutcome, group_id
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.task import TaskId
from rollbook.run.config.run import ConfigError, RunConfig
from rollbook.run.config.source import flat_values, load_source
from rollbook.run.reader import RecordedRun, open_run
from rollbook.simulation.fit import fit
from rollbook.simulation.prediction import (
    Prediction,
    extrapolations,
    frontier,
    on_machine,
    predict,
    recommend,
    what_ifs,
)
from rollbook.simulation.report import PredictionReport, SweptPoint, report_lines, size_label
from rollbook.simulation.setting import ConfiguredRun, Setting
from rollbook.simulation.trace import Trace, read_trace

SWEPT_BOUNDS = (0, 1, 2, 4)
MAX_GROUPS = 20_000
"""The newest groups of a trace that are used: enough for the distribution of durations."""
PAGE = 1_000


def configured_run(config: RunConfig) -> ConfiguredRun:
    inference = config.inference
    # On a CPU replicas share its cores instead; external servers have devices of their own.
    is_shared = inference.device != "cpu" and not config.resources.policy_gpus
    is_shared = is_shared and not inference.urls and not config.cluster.has_members
    return ConfiguredRun(
        setting=Setting(
            rule=replace(config.ledger_settings().rule, max_steps=None),
            samples_per_group=config.rollout.completions_per_prompt,
            slots=config.rollout.slots,
            workers=config.rollout.workers,
            replicas=max(inference.replicas, len(inference.urls)),
            replicas_per_device=inference.replicas if is_shared else 1,
        ),
        has_members=config.cluster.has_members,
        values=flat_values(config),
    )


def trace_of(path: Path) -> Trace:
    """The trace of a run directory."""
    with open_run(path) as run:
        return read_trace(path, configured_run(run.config), _stored_samples(run))


def _stored_samples(run: RecordedRun) -> dict[str, list[SampleOutcome]]:
    """The samples of each draw, by the time at which they ended."""
    found: dict[str, list[SampleOutcome]] = defaultdict(list)
    start = max(0, run.status().opened - MAX_GROUPS)
    while page := run.groups(start=start, limit=PAGE):
        for row in page:
            if (outcome := row.outcome) is not None:
                found[group_id(TaskId(row.task_id), row.draw)] += outcome.samples
        start = page[-1].sequence + 1
    for samples in found.values():
        samples.sort(key=lambda sample: (sample.started_at or 0.0) + (sample.seconds or 0.0))
    return found


def simulate(
    config_file: Path,
    traces: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    cores: float | None = None,
    seed: int = 0,
    varied: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> PredictionReport:
    """`varied`: `SECTION.FIELD=V1,V2,...` of a sweep; empty: bounds, policies and groups in flight; None: no sweep.

    `cores` of the machine; None: those of the trace.
    """
    if not traces:
        raise UsageError("no trace: give the directory of a run with --trace RUN")
    config = load_source(config_file, overrides).config
    progress(f"reading {len(traces)} {'trace' if len(traces) == 1 else 'traces'}")
    run = configured_run(config)
    fitted = on_machine(fit([trace_of(path) for path in traces]), run, cores=cores)
    durations = fitted.durations
    prediction = predict(run.setting, durations, seed=seed)
    progress("simulating changes of one setting")
    gains = what_ifs(prediction, durations, seed=seed)
    progress("looking for better settings")
    better = recommend(prediction, durations, seed=seed)
    points: list[tuple[tuple[str, ...], Prediction]] = []
    if varied is not None:
        grid = list(_grid(config, varied))
        for number, settings in enumerate(grid, start=1):
            progress(f"sweep: {number} of {len(grid)}")
            try:
                other = load_source(config_file, [*overrides, *settings]).config
            except ConfigError:
                if varied:
                    raise
                continue  # a combination of the default grid that this config excludes
            points.append((settings, predict(configured_run(other).setting, durations, seed=seed)))
    best = {id(point) for point in frontier([point for _, point in points])}
    return PredictionReport(
        fit=fitted,
        prediction=prediction,
        what_ifs=tuple(gains),
        recommended=better,
        extrapolations=tuple(extrapolations(fitted, run, prediction)),
        points=tuple(
            SweptPoint(overrides=settings, prediction=point, is_best=id(point) in best) for settings, point in points
        ),
    )


def _grid(config: RunConfig, varied: Sequence[str]) -> Iterator[tuple[str, ...]]:
    if varied:
        axes = []
        for text in varied:
            name, equals, values = text.partition("=")
            if not equals or not values:
                raise UsageError(f"--vary {text}: must look like gate.max_groups_in_flight=8,16,32")
            axes.append([f"{name}={value.strip()}" for value in values.split(",")])
        yield from itertools.product(*axes)
        return
    per_step = config.gate.groups_per_step
    bounds = sorted({*SWEPT_BOUNDS, config.gate.max_head_offpolicy_versions})
    for bound, policy in itertools.product(bounds, BatchPolicy):
        for size in sorted({per_step, (bound + 1) * per_step}):
            yield (
                f"gate.max_head_offpolicy_versions={bound}",
                f'gate.batch_policy="{policy}"',
                f"gate.max_groups_in_flight={size}",
            )


def draw(path: Path, report: PredictionReport) -> Path:
    """The swept points, the frontier and the run itself, as SVG."""
    draw_frontier = load_on_demand("rollbook.dashboard.plots:draw_frontier")
    series: dict[str, list[tuple[float, float, str]]] = {}
    for point in report.points:
        one = point.prediction
        entry = (one.lag_mean, one.tokens_per_s, size_label(one))
        series.setdefault(str(one.setting.rule.policy), []).append(entry)
    best = [(p.prediction.lag_mean, p.prediction.tokens_per_s) for p in report.points if p.is_best]
    own = (report.prediction.lag_mean, report.prediction.tokens_per_s)
    drawn: Path = draw_frontier(path, series, frontier=sorted(best), current=own)
    return drawn


def simulate_command(
    config: Annotated[
        Path, Argument(metavar="RUN.toml", help="The configuration to predict; a run directory: its own.")
    ],
    trace: Annotated[
        list[Path] | None,
        Option(
            "--trace",
            metavar="RUN",
            help="Directory of a finished or running run: durations are measured there. Repeat it to cover more sizes. "
            "Default: the run directory whose configuration is predicted.",
        ),
    ] = None,
    *,
    override: Overrides = None,
    sweep: Annotated[
        bool, Option("--sweep", help="Also simulate a grid of settings and draw the frontier of speed and lag.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        Option(
            "--vary",
            metavar="SECTION.FIELD=V1,V2,...",
            help="An axis of the grid; may be repeated. Default: bounds, batch policies and groups in flight.",
        ),
    ] = None,
    out: Annotated[Path, Option("--out", help="With --sweep: the SVG to write.")] = Path("frontier.svg"),
    cores: Annotated[
        float | None,
        Option("--cores", min=0.1, help="Cores of the machine. Default: those that the trace had."),
    ] = None,
    seed: Annotated[int, Option("--seed", help="Random seed of the simulation.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Predict throughput, lag, idle time and the first bottleneck of a run with other sizes, without running it.

    The real rules of gate and batches run on a simulated clock; durations come from the traces. See docs/simulate.md.
    """
    console = stderr_console()
    with console.status("") as shown:
        report = simulate(
            config,
            trace or ([config] if config.is_dir() else []),
            overrides=override or (),
            cores=cores,
            seed=seed,
            varied=(vary or ()) if sweep or vary else None,
            progress=shown.update,
        )
    if report.points:
        console.print(f"written: {draw(out, report)}", markup=False, soft_wrap=True)
    if as_json:
        result_json(report.row())
        return
    for line in report_lines(report):
        result(line)
