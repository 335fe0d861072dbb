"""Runs the code blocks of the guide to writing an environment."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.config import EnvConfig
from rollbook.tasks.config import TasksConfig

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/writing-an-environment.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_code_of_the_guide_prints_the_shown_output(tmp_path: Path) -> None:
    environment, *rest = blocks("python")
    (tmp_path / "lock.py").write_text(environment)
    (tmp_path / "session.py").write_text("\n".join(rest))
    code = [sys.executable, "-W", "error", "session.py"]
    done = subprocess.run(
        code,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""},
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["Open the lock: three digits.", "2 of 3 digits are right.", "1.0", "1.0"]


def test_the_run_file_of_the_guide_is_valid(tmp_path: Path) -> None:
    (tmp_path / "lock.py").write_text(blocks("python")[0])
    run = next(table for table in map(tomllib.loads, blocks("toml")) if table["env"].get("name") == "lock:Lock")
    TasksConfig.model_validate(run["tasks"])
    sys.path.insert(0, str(tmp_path))
    try:
        EnvironmentSource(EnvConfig.model_validate(run["env"])).close()
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("lock", None)
