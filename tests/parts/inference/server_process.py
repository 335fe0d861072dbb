"""A scripted policy server in its own process, so that tests can kill it."""

import asyncio
import subprocess
import sys
from pathlib import Path

from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve

ROOT = Path(__file__).parents[3]


async def start_server(ready: Path, port: int = 0, *, token: str = "") -> tuple[subprocess.Popen[bytes], str]:
    """The process and its URL. `ready`: a file for the URL."""
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(  # noqa: ASYNC220  # starting is quick, and the test must be able to kill it
        [sys.executable, "-m", "tests.parts.inference.server_process", str(port), str(ready), token], cwd=ROOT
    )
    async with asyncio.timeout(60):
        while not (ready.exists() and ready.read_text().startswith("http")):  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(0.01)
    return process, ready.read_text()


async def main(port: int, ready: Path, token: str) -> None:
    config = InferenceConfig(engine="scripted", scripted=ScriptedConfig(token_s=0.001))
    async with (
        open_engine(config, None) as engine,
        serve(build_app(engine, config, steering_token=token or None), port=port) as url,
    ):
        ready.write_text(url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
