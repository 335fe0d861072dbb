"""What `rollbook doctor` concludes from the facts of a machine."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from rollbook.commands.checks.doctor import NodeFacts, examine, node_findings, print_plan
from rollbook.commands.checks.findings import Verdict
from rollbook.commands.checks.sandboxes import agent_findings, run_findings, sandbox_findings
from rollbook.commands.output import EXIT_FAILED
from rollbook.run.config.run import RunConfig
from tests.parts.run.projects import project
from tests.parts.sandbox.bubblewrap import require_bubblewrap

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


def test_a_sandbox_is_started_and_its_commands_run() -> None:
    require_bubblewrap()
    (found,) = sandbox_findings()
    assert (found.name, found.verdict, found.advice) == ("sandbox bubblewrap", Verdict.OK, "")


@pytest.mark.parametrize(("is_required", "verdict"), [(False, Verdict.ABSENT), (True, Verdict.BROKEN)])
def test_a_sandbox_that_cannot_start_is_broken_only_for_a_run_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, is_required: bool, verdict: Verdict
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = sandbox_findings(is_required=is_required)
    assert found.verdict is verdict
    assert "apt-get install bubblewrap" in found.found
    assert 'sandbox = "none"' in found.found


def test_a_sandbox_of_another_kind_that_works_here_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_bubblewrap()
    (tmp_path / "bwrap").symlink_to(str(shutil.which("bwrap")))
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = sandbox_findings("podman", is_required=True)
    assert (found.verdict, found.advice) == (Verdict.BROKEN, 'sandbox = "bubblewrap" works on this machine. ')


def install(directory: Path, **programs: str) -> str:
    """Programs with these shell scripts. Returns the search path."""
    for name, script in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (directory / name).chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def test_each_coding_agent_is_named_with_its_version_or_how_to_install_it(tmp_path: Path) -> None:
    path = install(tmp_path, codex="echo codex-cli 0.99.1", pi="exit 1", claude="echo 2.1.9 '(Claude Code)'")
    found = {finding.name.removeprefix("agent "): finding for finding in agent_findings(path=path)}
    assert (found["codex"].verdict, found["codex"].found) == (Verdict.OK, f"0.99.1 ({tmp_path / 'codex'})")
    assert found["claude-code"].found.startswith("2.1.9 (")
    assert (found["pi"].verdict, found["pi"].advice) == (
        Verdict.BROKEN,
        "install it again: npm install -g @mariozechner/pi-coding-agent",
    )
    assert found["mini-swe-agent"].verdict is Verdict.ABSENT
    assert found["mini-swe-agent"].advice.startswith("pip install mini-swe-agent")


def test_a_run_needs_the_agent_and_the_sandbox_that_it_names(tmp_path: Path) -> None:
    config = {
        "run": {"name": "agents"},
        "model": {"path": "somewhere"},
        "tasks": {"source": "somewhere:tasks"},
        "rollout": {
            "function": "agent",
            "settings": {"agent": "codex", "sandbox": "none", "environment": {"PATH": install(tmp_path)}},
        },
    }
    found = {finding.name: finding for finding in run_findings(RunConfig.model_validate(config))}
    assert found["sandbox none"].found == "code runs unconfined, as configured"
    assert (found["agent codex"].verdict, found["agent codex"].advice) == (
        Verdict.BROKEN,
        "npm install -g @openai/codex",
    )
    guessing = {**config, "rollout": {}}
    assert run_findings(RunConfig.model_validate(guessing)) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"reward": "my_reward:reward"}, []),
        ({"sandbox": "bubblewrap"}, ["sandbox bubblewrap"]),
        ({"reward": "harbor"}, ["sandbox bubblewrap"]),
    ],
    ids=["unconfined", "confined", "Harbor tasks"],
)
def test_a_run_of_a_command_needs_the_sandbox_in_which_it_runs(settings: dict[str, str], names: list[str]) -> None:
    config = {
        "run": {"name": "agents"},
        "model": {"path": "somewhere"},
        "tasks": {"source": "somewhere:tasks"},
        "rollout": {"function": "agent", "settings": {"command": ["my-agent"], **settings}},
    }
    assert [finding.name for finding in run_findings(RunConfig.model_validate(config))] == names


def test_a_model_directory_that_is_empty_is_a_fault_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project(tmp_path, "135m")
    (tmp_path / "135m" / "config.json").unlink()
    assert print_plan(file, (), directory=tmp_path, as_json=False) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert re.search(rf"BROKEN {file}:\d+: model\.path: .*/135m has no config\.json; a model directory has", printed)
    assert "no memory plan" not in printed
