"""A scripted policy server in a process of its own, so that tests can kill it. Run as a module: port, then a ready file."""

import asyncio
import sys
from pathlib import Path

from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve


async def main(port: int, ready: Path) -> None:
    config = InferenceConfig(engine="scripted", scripted=ScriptedConfig(token_s=0.001))
    async with open_engine(config, None) as engine, serve(build_app(engine, config), port=port) as url:
        ready.write_text(url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
