"""What a check of this machine found."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    ABSENT = "absent"
    """Optional, and not there."""
    BROKEN = "broken"
    """It is there, or required, and does not work."""


LABELS = {Verdict.OK: "ok     ", Verdict.ABSENT: "absent ", Verdict.BROKEN: "BROKEN "}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def finding_lines(findings: Sequence[DoctorFinding]) -> list[str]:
    width = max([14, *(len(finding.name) + 2 for finding in findings)])
    return [
        f"{LABELS[finding.verdict]}{finding.name:<{width}}{finding.found}"
        + (f": {finding.advice}" if finding.advice else "")
        for finding in findings
    ]
