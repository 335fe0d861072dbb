"""`rollbook audit`: checks the ledger of a run. Exits non-zero on a violation."""

import os
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from rollbook.commands.arguments import Option, RunOrLedger, is_address
from rollbook.commands.output import EXIT_FAILED, result, result_json, stderr_console
from rollbook.commands.training.train_summary import law_text
from rollbook.contracts.admission import AuditReport
from rollbook.ledger.client.blocking import audit_at
from rollbook.run.reader import audit, audit_report


def audit_command(
    run: RunOrLedger,
    full: Annotated[
        bool, Option("--full", help="Read durable and dropped groups again that were audited before.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the report as one JSON line.")] = False,
) -> int:
    """Check the conservation law, every group's history, batches, steps, payloads and lag."""
    if is_address(run):
        token = os.environ.get("ROLLBOOK_VIEWER_TOKENS")
        reports = [audit_report(view) for view in audit_at(run, token=token, full=full)]
    else:
        reports = [audit(run, full=full)]
    for report in reports:
        _print(report, as_json=as_json)
    return 0 if all(report.ok for report in reports) else EXIT_FAILED


def _print(report: AuditReport, *, as_json: bool) -> None:
    if as_json:
        result_json({**asdict(report), "ok": report.ok})
    else:
        result(f"run {report.run_id}: {law_text(report)}")
        if (samples := report.samples) is not None:
            missing = "".join(f" + {count} missing ({kind})" for kind, count in samples.missing.items())
            result(f"samples: {samples.expected} expected = {samples.stored} stored + {samples.open} open{missing}")
        for reason, count in report.left_out.items():
            result(f"stored and not trained: {count} sequences ({reason})")
        bound = report.max_head_offpolicy_versions
        lag = f"a lag of {bound} is" if report.max_lag is None else f"lag at most {report.max_lag} of {bound}"
        result(f"steps trained: {report.steps}; {lag} allowed")
        if report.known_at is not None:
            when = datetime.fromtimestamp(report.known_at).astimezone().isoformat(" ", "seconds")
            result(f"{report.known} settled groups were audited at {when} and not read again; --full reads them")
        result("audit: ok" if report.ok else f"audit: {len(report.violations)} violations")
    for violation in report.violations:
        stderr_console().print(f"  {violation}", markup=False, style="red", soft_wrap=True)
