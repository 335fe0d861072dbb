"""The page on the ledger client is executed against a server that is started as the page says."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.concurrency.until import until

PAGE = (Path(__file__).parents[2] / "docs" / "ledger-client.md").read_text(encoding="utf-8")


@pytest.fixture
def _server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```sh\nrollbook (ledger serve .*)\n```", PAGE)
    assert found is not None
    process = subprocess.Popen([sys.executable, "-m", "rollbook", *shlex.split(found[1])])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.usefixtures("_server")
async def test_the_blocks_of_the_page_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    await until(lambda: Path("ready").exists())
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "ledger-client.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "epoch 1 gate open" in printed
    assert "['task0@0', 'task1@0']" in printed
    assert "'durable': 2" in printed
    assert "True" in printed
