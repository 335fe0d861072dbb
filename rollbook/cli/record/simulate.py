"""`rollbook simulate`: predicts a run with other sizes from the trace of a run."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import AsJson, Overrides
from rollbook.cli.output import result, result_json, stderr_console
from rollbook.commands.record.simulate import draw
from rollbook.commands.record.simulate import simulate as run_simulation
from rollbook.simulation.report import report_lines


def simulate(
    config: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The configuration to predict.")],
    trace: Annotated[
        list[Path],
        typer.Option(
            "--trace",
            metavar="RUN",
            help="Directory of a finished or running run: durations are measured there. Repeat it to cover more sizes.",
        ),
    ],
    *,
    override: Overrides = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also simulate a grid of settings and draw the frontier of speed and lag.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="SECTION.FIELD=V1,V2,...",
            help="An axis of the grid; may be repeated. Default: bounds, batch policies and groups in flight.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="With --sweep: the SVG to write.")] = Path("frontier.svg"),
    cores: Annotated[
        float | None,
        typer.Option("--cores", min=0.1, help="Cores of the machine. Default: those that the trace had."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the simulation.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Predict throughput, lag, idle time and the first bottleneck of a run with other sizes, without running it.

    The real rules of gate and batches run on a simulated clock; durations come from the traces. See docs/simulate.md.
    """
    console = stderr_console()
    with console.status("") as shown:
        report = run_simulation(
            config,
            trace,
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
