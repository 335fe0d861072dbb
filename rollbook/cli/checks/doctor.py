"""`rollbook doctor`: what works on this machine, and what to install."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import AsJson
from rollbook.cli.output import EXIT_FAILED, result, result_json
from rollbook.run.doctor import Verdict, examine

SIGNS = {Verdict.OK: "ok     ", Verdict.ABSENT: "absent ", Verdict.BROKEN: "BROKEN "}


def doctor(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where runs would be written; its disk and permissions are checked.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Check torch, GPUs, vLLM, ports, disk, shared memory, PostgreSQL and confinement. Exits 1 if something is broken."""
    findings = examine(directory)
    if as_json:
        result_json({"findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            advice = f": {finding.advice}" if finding.advice else ""
            result(f"{SIGNS[finding.verdict]}{finding.name:<14}{finding.found}{advice}")
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise typer.Exit(EXIT_FAILED)
