"""The simulator's own process: MiniStack on a socket that its parent bound, confined to its private directory.

Its parent runs it as `python -m rollbook.envs.builtin.awscli.cloud.simulator_process SETTINGS`. Besides `LAMBDA_STRICT=1`,
which keeps the code
of functions from being executed on this machine, the confinement refuses every program start and every outgoing connection: a
subscription to `http://127.0.0.1:<a neighbour's port>/` reaches nobody.
"""

import asyncio
import json
import sys

from hypercorn.asyncio import serve
from hypercorn.config import Config
from ministack.app import app  # type: ignore[import-untyped]  # the package ships no types

from rollbook.concurrency.parent_watch import die_with_parent
from rollbook.envs.sandboxes.confinement import Reach, confine, interpreter_roots, limit

MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 256 * 2**20


def main() -> None:
    settings = json.loads(sys.argv[1])
    die_with_parent(int(settings["watch_fd"]))
    limit(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    config = Config()
    config.bind = [f"fd://{settings['socket_fd']}"]
    config.keep_alive_timeout = 3600.0
    config.loglevel = "WARNING"
    config.accesslog = None
    confine(Reach(writable=(settings["directory"],), readable=(*interpreter_roots(), "/proc/self", "/proc/meminfo")))
    asyncio.run(serve(app, config))


if __name__ == "__main__":
    main()
