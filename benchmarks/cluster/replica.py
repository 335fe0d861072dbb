"""A policy server without a model: `python -m benchmarks.cluster.replica HOST TOKEN`. Prints its address; ends with its input."""

import asyncio
import sys

from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve


async def main(host: str, token: str) -> None:
    config = InferenceConfig(engine="scripted")
    async with (
        open_engine(config, None) as engine,
        serve(build_app(engine, config, steering_token=token), host=host) as url,
    ):
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
