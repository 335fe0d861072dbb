"""What `rollbook doctor` concludes from the facts of a machine."""

import sys
from pathlib import Path

import pytest

from rollbook.commands.checks.doctor import NodeFacts, Verdict, examine, node_findings

OURS = {"python": "3.11.7", "torch": "2.13.0"}
GOOD = NodeFacts(address="10.0.0.6", versions=OURS, sees_directory=True, mib_per_s=900.0)


def broken(node: NodeFacts) -> dict[str, str]:
    findings = node_findings(node, OURS, host="10.0.0.5", directory=Path("/shared/runs"))
    return {
        f.name.removeprefix(f"{node.address} "): f"{f.found}: {f.advice}"
        for f in findings
        if f.verdict is not Verdict.OK
    }


def test_a_node_like_this_machine_has_no_fault() -> None:
    assert broken(GOOD) == {}


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"versions": {"python": "3.11.7"}}, "versions", "torch missing, not 2.13.0: install the same"),
        ({"clock_offset_s": -30.0}, "clock", "-30.00 s: set the clock"),
        ({"sees_directory": False}, "directory", "/shared/runs is not visible: mount the file system"),
        ({"network_error": "timed out"}, "network", "timed out: the node must reach 10.0.0.5"),
        ({"error": "worker died"}, "node", "worker died: restart Ray"),
    ],
)
def test_each_fault_of_a_node_is_named_with_what_to_do(changes: dict[str, object], name: str, text: str) -> None:
    facts = {"address": "10.0.0.6", "versions": OURS, "sees_directory": True, "mib_per_s": 900.0, **changes}
    found = broken(NodeFacts(**facts))  # type: ignore[arg-type]
    assert list(found) == [name]
    assert found[name].startswith(text)


@pytest.mark.parametrize(
    ("is_disabled", "verdict", "advice"),
    [(False, Verdict.OK, ""), (True, Verdict.ABSENT, "unset PYTHONDONTWRITEBYTECODE: processes start sooner")],
)
def test_bytecode_that_is_not_cached_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_disabled: bool, verdict: Verdict, advice: str
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", is_disabled)
    monkeypatch.setattr("rollbook.commands.checks.doctor._run", lambda code: (0, "1.0"))
    (found,) = [finding for finding in examine(tmp_path) if finding.name == "bytecode"]
    assert (found.verdict, found.advice) == (verdict, advice)
