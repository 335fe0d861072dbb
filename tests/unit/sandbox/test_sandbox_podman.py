"""The command that starts a container of podman."""

import os
import shutil
from pathlib import Path

import pytest

from rollbook.sandbox import podman
from rollbook.sandbox.plan import SandboxPlan
from rollbook.sandbox.sandbox import Image, Limits, SandboxUnavailableError

PLAN = SandboxPlan(kind="podman", image=Image(), limits=Limits(), env={})


@pytest.mark.parametrize(
    ("files", "has_runc", "runtime"),
    [
        (("cgroup.controllers",), True, []),
        (("memory", "unified"), True, ["--runtime", "runc"]),
        (("memory",), True, ["--runtime", "runc"]),
        (("memory",), False, []),
    ],
)
def test_crun_gets_no_machine_with_control_groups_of_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], has_runc: bool, runtime: list[str]
) -> None:
    _machine(tmp_path, monkeypatch, files=files, has_runc=has_runc)
    command = podman.podman_command(PLAN)
    assert command[command.index("podman") + 1 : command.index("run")] == runtime


def test_a_machine_that_needs_runc_and_has_none_is_told_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(tmp_path, monkeypatch, files=("memory", "unified"), has_runc=False)
    with pytest.raises(SandboxUnavailableError, match=r"install runc, .* \(apt-get install runc\)"):
        podman.podman_command(PLAN)


def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, files: tuple[str, ...], has_runc: bool) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(podman, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "runc" and not has_runc else f"/usr/bin/{name}")
