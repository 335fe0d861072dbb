"""`rollbook init`: each template is a project whose tests pass and which trains as it is."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollbook.cli.main import app
from rollbook.commands.training.init import TEMPLATES_DIR, init_project, template_names
from rollbook.contracts.errors import UsageError
from rollbook.run.config.run import load_config
from rollbook.run.reader import open_run
from tests.parts.run.small import REPOSITORY

TEMPLATES = ("agent_proxy", "atropos", "multi_turn", "single_turn", "tools")


def run(*command: str, cwd: Path, timeout_s: float = 500.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_templates_are_those_of_the_documentation() -> None:
    assert template_names() == list(TEMPLATES)


# Every template makes a project with tests; those of one template are enough for every change.
@pytest.mark.parametrize(
    "template", [pytest.param(name, marks=[pytest.mark.slow] if name != "tools" else []) for name in TEMPLATES]
)
def test_the_tests_of_a_new_project_pass(tmp_path: Path, template: str) -> None:
    init_project(tmp_path / "game", template=template, model=None)
    tests = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "game")
    assert tests.returncode == 0, tests.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_is_valid(tmp_path: Path, template: str) -> None:
    project = tmp_path / "word-game"
    shown = CliRunner().invoke(app, ["init", str(project), "--template", template])
    assert shown.exit_code == 0, shown.output
    assert {"README.md", "run.toml", "test_project.py"} < {path.name for path in project.iterdir()}
    assert load_config(project / "run.toml").config.run.name == "word-game"
    assert not any("my_project" in path.read_text(encoding="utf-8") for path in project.iterdir())


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_for_a_real_model_changes_each_setting_that_the_template_marks(tmp_path: Path, template: str) -> None:
    model = tmp_path / "models" / "smol"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    project = tmp_path / "game"
    init_project(project, template=template, model=str(model))
    text = (project / "run.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    assert table["model"] == {"path": str(model)}
    assert "real model:" not in text
    original = (TEMPLATES_DIR / template / "run.toml").read_text(encoding="utf-8")
    marked = re.findall(r"^(\w+) = .*# real model: (.+)$", original, re.MULTILINE)
    assert len(marked) >= 2
    for name, value in marked:
        is_removed = value == "remove this line"
        assert (f"\n{name} = " not in text) if is_removed else (f"\n{name} = {value}\n" in text)
    # Nothing else has changed: all other sections are those of the template.
    assert tomllib.loads(original).keys() == table.keys()


def test_a_directory_with_files_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1", encoding="utf-8")
    with pytest.raises(UsageError, match="already exists"):
        init_project(tmp_path, template="tools", model=None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "template", "model", "message"),
    [
        ("game", "toools", None, "no template 'toools'; the templates are agent_proxy, atropos"),
        ("my game", "tools", None, "'my game' cannot be the name of a run"),
        ("game", "tools", "no/such/model", "no such directory"),
        ("game", "tools", str(TEMPLATES_DIR), "no config.json"),
    ],
)
def test_a_wrong_argument_is_explained_and_writes_nothing(
    tmp_path: Path, name: str, template: str, model: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        init_project(tmp_path / name, template=template, model=model)
    assert list(tmp_path.iterdir()) == []


def train(project: Path, *overrides: str, port: int | None = None, max_rows: int | None = None) -> dict[str, Any]:
    arguments = ["train", "run.toml", "--run-dir", "runs/first", "--json"]
    arguments += [] if max_rows is None else ["--max-rows", str(max_rows)]
    arguments += [part for text in overrides for part in ("--set", text)]
    player = None
    if (project / "environment.py").exists() and port is not None:
        player = subprocess.Popen([sys.executable, "environment.py", "runs/first"], cwd=project)
    try:
        done = run("-m", "rollbook", *arguments, cwd=project, timeout_s=800.0)
        assert done.returncode == 0, done.stderr[-4000:]
        if player is not None:
            assert player.wait(60) == 0
    finally:
        if player is not None:
            player.kill()
            player.wait()
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.slow
def test_a_new_project_trains_on_the_first_rows_if_max_rows_is_given(tmp_path: Path) -> None:
    project = tmp_path / "game"
    init_project(project, template="tools", model=None)
    summary = train(project, "trainer.max_steps=2", "gate.groups_per_step=4", max_rows=3)
    assert summary["steps"] == 2
    assert summary["audit"] == "ok"
    with open_run(project / "runs" / "first") as record:
        # Oslo-2, the second of the three rows, is held out.
        assert {group.task_id for group in record.groups(limit=100)} == {"Oslo-1", "Oslo-3"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_learns(tmp_path: Path, template: str, unused_tcp_port: int) -> None:
    init_project(tmp_path / "game", template=template, model=None)
    posted = (f"tasks.atropos.port={unused_tcp_port}",) if template == "atropos" else ()
    summary = train(tmp_path / "game", *posted, port=unused_tcp_port if posted else None)
    assert summary["audit"] == "ok"
    assert summary["reward_last"] > summary["reward_first"] + 0.25, summary
