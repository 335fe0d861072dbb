"""What `rollbook doctor` checks of sandboxes and coding agents: it starts a sandbox, and asks every program for its version."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rollbook.commands.checks.findings import DoctorFinding, Verdict
from rollbook.concurrency.blocking import run_blocking
from rollbook.rollout.agents.coding_agents import CODING_AGENTS
from rollbook.run.config.run import RunConfig
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import SandboxError, SandboxUnavailableError

VERSION_S = 30.0
CONTAINERS: tuple[Kind, ...] = ("podman", "docker")
VERSION = re.compile(r"\d+\.\d[\w.+-]*(?<!\.)")
HARBOR = "harbor"
WITH_SANDBOX = frozenset({"code", "files", HARBOR})
"""Built-in environments that open sandboxes."""


def sandbox_findings(kind: Kind = "bubblewrap", *, is_required: bool = False) -> list[DoctorFinding]:
    """Start a sandbox of this kind. If none starts, try the other kinds too, to name those that work here."""
    found = _start(kind, is_required=is_required)
    if found.verdict is Verdict.OK:
        return [found]
    others: tuple[Kind, ...] = ("bubblewrap", *CONTAINERS)
    works = [one for one in others if one != kind and _start(one, is_required=False).verdict is Verdict.OK]
    advice = "".join(f'sandbox = "{one}" works on this machine. ' for one in works)
    return [DoctorFinding(name=found.name, verdict=found.verdict, found=found.found, advice=advice + found.advice)]


def _start(kind: Kind, *, is_required: bool) -> DoctorFinding:
    name, began = f"sandbox {kind}", time.perf_counter()
    try:
        answer = run_blocking(_say_hello(kind))
    except (SandboxUnavailableError, SandboxError) as error:
        is_there = is_required or shutil.which({"bubblewrap": "bwrap"}.get(kind, kind)) is not None
        return DoctorFinding(name=name, verdict=Verdict.BROKEN if is_there else Verdict.ABSENT, found=str(error))
    milliseconds = (time.perf_counter() - began) * 1000
    if answer != "hello":
        return DoctorFinding(
            name=name, verdict=Verdict.BROKEN, found=f"it starts, but its commands do not work: {answer}"
        )
    if kind == "none":
        return DoctorFinding(name=name, verdict=Verdict.OK, found="code runs unconfined, as configured")
    return DoctorFinding(
        name=name, verdict=Verdict.OK, found=f"started, ran a command and ended in {milliseconds:.0f} ms"
    )


async def _say_hello(kind: Kind) -> str:
    async with open_sandbox(kind=kind) as sandbox:
        return (await sandbox.exec("echo hello", timeout_s=VERSION_S)).text.strip()


def agent_findings(names: Sequence[str] = tuple(CODING_AGENTS), *, path: str | None = None) -> list[DoctorFinding]:
    """Where each coding agent is and which version it has. `path`: search path; None: that of this process. Each that is named by
    a run is required."""
    is_required = tuple(names) != tuple(CODING_AGENTS)
    with ThreadPoolExecutor(max_workers=len(CODING_AGENTS)) as pool:
        return list(pool.map(partial(_agent, path=path, is_required=is_required), names))


def _agent(name: str, *, path: str | None, is_required: bool) -> DoctorFinding:
    agent = CODING_AGENTS[name]
    program = shutil.which(agent.program, path=path)
    label = f"agent {name}"
    if program is None:
        verdict = Verdict.BROKEN if is_required else Verdict.ABSENT
        return DoctorFinding(name=label, verdict=verdict, found="not installed", advice=agent.install)
    version = _version_of(Path(program), path)
    if version is None:
        return DoctorFinding(
            name=label,
            verdict=Verdict.BROKEN,
            found=f"{program} does not start",
            advice=f"install it again: {agent.install}",
        )
    return DoctorFinding(name=label, verdict=Verdict.OK, found=f"{version} ({program})")


def _version_of(program: Path, path: str | None) -> str | None:
    """What it prints for `--version`. None: it does not start. It gets a home of its own, so that it writes nothing elsewhere."""
    with TemporaryDirectory(prefix="rollbook-doctor-", ignore_cleanup_errors=True) as home:
        environment = {"PATH": path or os.environ.get("PATH", ""), "HOME": home}
        try:
            done = subprocess.run(
                [str(program), "--version"],
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=VERSION_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    found = VERSION.search(done.stdout + done.stderr)
    return None if found is None else found[0]


def run_findings(config: RunConfig) -> list[DoctorFinding]:
    """The sandboxes and the coding agent that this run needs. A command has a sandbox if one is set, or that of a Harbor task."""
    settings, args = config.rollout.settings, config.env.args
    agent = config.coding_agent
    kinds: list[Kind] = []
    is_confined = "sandbox" in settings or settings.get("reward") == HARBOR
    if agent is not None or (config.rollout.function == "agent" and is_confined):
        kinds.append(settings.get("sandbox", "bubblewrap"))
    if config.env.name in WITH_SANDBOX or "sandbox" in args:
        kinds.append(args.get("sandbox", "bubblewrap"))
    found = [finding for kind in dict.fromkeys(kinds) for finding in sandbox_findings(kind, is_required=True)]
    if agent is not None:
        found += agent_findings([agent], path=settings.get("environment", {}).get("PATH"))
    return found
