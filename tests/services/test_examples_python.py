"""The README's example and the notebook, executed as users do it."""

import asyncio
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rollbook import audit
from rollbook.access.tokens import read_or_create_token, user_token_file
from rollbook.contracts.policy import SamplingParams
from rollbook.envs.config import EnvConfig
from rollbook.envs.server.run import serve_environments
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.server.app import build_app, serve
from rollbook.run.directory import RunDirectory
from tests.parts.inference.engines import TinyModel, engine_config

ROOT = Path(__file__).parents[2]


def readme_example() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def readme_run(directory: Path) -> Path:
    """The run of the README's example, which was executed as a script and then deleted."""
    script = directory / "opposites.py"
    script.write_text(readme_example(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script.name], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    solved = re.search(r"solved: (\d+)% → (\d+)%", done.stdout)
    assert solved is not None, done.stdout
    assert int(solved[2]) >= int(solved[1]) + 30
    script.unlink()
    return directory / "runs" / "opposites"


@pytest.mark.timeout(900)
def test_the_readme_example_trains_as_a_script(tmp_path: Path) -> None:
    assert len(readme_example().splitlines()) <= 30
    run = readme_run(tmp_path)
    assert {path.suffix for path in (run / "objects").iterdir()} >= {".py", ".pkl", ".jsonl"}
    assert audit(run).ok
    assert max(RunDirectory(run).checkpoint_models()) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_line_resumes_the_readme_example_from_the_objects_in_its_run_directory(tmp_path: Path) -> None:
    run = readme_run(tmp_path)
    command = [sys.executable, "-m", "rollbook", "train", str(run), "--set", "trainer.max_steps=42", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    resumed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert json.loads(resumed.stdout.splitlines()[-1])["steps"] == 42
    assert audit(run).ok
    assert max(RunDirectory(run).checkpoint_models()) == 42


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's client
async def test_the_notebook_trains_evaluates_inspects_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = ROOT / "examples" / "train_in_a_notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # it is not typed
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    await client.async_execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "audit ok: True" in printed
    assert "replayed bit for bit: True" in printed
    assert _solved(printed, "step 20") >= _solved(printed, "step 0") + 20
    assert any("image/png" in output.get("data", {}) for output in outputs)


def _solved(printed: str, step: str) -> int:
    found = re.search(rf"{step}: (\d+)% of", printed)
    assert found is not None, printed
    return int(found[1])


async def test_the_synchronous_example_learns_with_a_pool_of_sessions() -> None:
    spec = importlib.util.spec_from_file_location(
        "synchronous_grpo", ROOT / "examples/01_number_guessing/synchronous_grpo.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    async with serve_environments(EnvConfig(name="number_guessing"), size=8) as server:
        before, after = [
            await asyncio.to_thread(example.main, ["--url", server.url, "--steps", steps]) for steps in ("20", "120")
        ]
    assert after > before + 0.02


async def test_the_own_trainer_of_30_lines_publishes_every_step_to_a_policy_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyModel(root=tmp_path)
    token = read_or_create_token(user_token_file())
    async with tiny.engine("transformers") as engine:
        app = build_app(engine, engine_config("transformers"), steering_token=token)
        async with serve(app) as url, open_policy_client(url, request_s=30) as client:
            example = ROOT / "examples" / "06_trl" / "own_trainer.py"
            monkeypatch.setattr(sys, "argv", [str(example), "--model", str(tiny.model_dir), "--url", url])
            await asyncio.to_thread(runpy.run_path, str(example), run_name="__main__")
            completion = await client.complete([1, 2, 3], SamplingParams(max_tokens=4))
        published = engine.publication
    assert capsys.readouterr().out.split("\n")[:3] == ["version 1", "version 2", "version 3"]
    assert published is not None
    assert published.step == 3
    assert set(completion.versions.tolist()) == {published.id}
