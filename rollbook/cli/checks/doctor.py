"""`rollbook doctor`: what works on this machine, and what to install."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import AsJson
from rollbook.cli.output import EXIT_FAILED, result, result_json
from rollbook.run.doctor import Verdict, examine, examine_cluster

SIGNS = {Verdict.OK: "ok     ", Verdict.ABSENT: "absent ", Verdict.BROKEN: "BROKEN "}


def doctor(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where runs would be written; its disk and permissions are checked.")
    ] = Path(),
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ADDRESS", help="Check every node of this Ray cluster instead: 10.0.0.5:6379"
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", help="With --cluster: the address of this machine for the run (cluster.host)."),
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Check torch, GPUs, vLLM, ports, disk, shared memory, PostgreSQL and confinement. Exits 1 if something is broken.

    With --cluster: the versions, GPUs, clock, shared directory and network of every node.
    """
    findings = examine(directory) if cluster is None else examine_cluster(cluster, host=host, directory=directory)
    if as_json:
        result_json({"findings": [asdict(finding) for finding in findings]})
    else:
        width = max(14, *(len(finding.name) + 2 for finding in findings))
        for finding in findings:
            advice = f": {finding.advice}" if finding.advice else ""
            result(f"{SIGNS[finding.verdict]}{finding.name:<{width}}{finding.found}{advice}")
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise typer.Exit(EXIT_FAILED)
