"""Runs the notebook, cell by cell, in one event loop."""

import ast
import inspect
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rollbook.envs.config import EnvConfig
from rollbook.envs.server.run import serve_environments

NOTEBOOK = Path(__file__).parents[2] / "examples/multiple_connects.ipynb"


@pytest.mark.parametrize("server", ["its own", pytest.param("a running one", marks=pytest.mark.slow)])
async def test_eight_sessions_of_the_notebook_leave_eight_independent_traces(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ministack")
    pytest.importorskip("awscli")
    async with AsyncExitStack() as stack:
        if server == "a running one":
            env = EnvConfig(name="aws", args={"base_port": 0})
            running = await stack.enter_async_context(serve_environments(env, size=8))
            monkeypatch.setenv("AWS_RL_ENV_URL", running.url)
        await run_notebook(capsys)


async def run_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), cell["id"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)  # our own file, read above
            if inspect.iscoroutine(result):
                await result
    shown = capsys.readouterr().out
    assert "eight independent traces" in shown
    assert "every environment was returned" in shown
    written = "".join(line for cell in cells for output in cell.get("outputs", []) for line in output["text"])
    assert [line for line in shown.splitlines() if " sees " in line] == [
        line for line in written.splitlines() if " sees " in line
    ]
