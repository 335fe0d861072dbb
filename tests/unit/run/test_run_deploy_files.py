"""The files in `deploy/` use settings and options that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from rollbook.cli.main import app
from rollbook.run.config.run import RunConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = sorted(DEPLOY.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_setting_of_a_file_exists(file: Path) -> None:
    paths = re.findall(r"--set[= ]\"?([a-z_]+(?:\.[a-z_]+)+)=", file.read_text(encoding="utf-8"))
    assert paths
    for path in paths:
        model: Any = RunConfig
        for name in path.split("."):
            assert issubclass(model, BaseModel), path
            assert name in model.model_fields, path
            model = model.model_fields[name].annotation


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_option_of_a_command_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for verb in ("train", "join"):
        shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output)
        for line in text.splitlines():
            if f"ollbook {verb} " in line or f"ROLLBOOK {verb} " in line:
                options = re.findall(r"(--[a-z-]+)", line.split(f" {verb} ")[1].split("$(")[0])
                assert all(option in shown for option in options), (line, options)


def test_the_manifests_are_yaml_with_the_services_that_a_run_needs() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert set(compose["services"]) == {"postgres", "trainer", "policy", "rollout"}
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
