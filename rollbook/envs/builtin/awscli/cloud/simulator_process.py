"""The main function of a simulator process: MiniStack on a socket that its parent bound, confined to its private directory.

`LAMBDA_STRICT=1` prevents the execution of Lambda code on this machine. The confinement also refuses every program start and every
outgoing connection: a subscription to `http://127.0.0.1:PORT/` of another simulator is not delivered.
"""

import asyncio
import json
import os
import sys

from hypercorn.asyncio import serve
from hypercorn.config import Config
from ministack.app import app  # type: ignore[import-untyped]  # the package ships no types

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.envs.builtin.awscli.cloud.simulator_guard import TOKEN_VARIABLE, guarded
from rollbook.envs.sandboxes.confinement import Permissions, confine, interpreter_roots, limit_resources, package_root

MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 256 * 2**20


def main() -> None:
    parent = connect_to_parent(int(sys.argv[1]))
    die_with_parent(parent.fileno())
    settings = json.loads(sys.argv[2])
    limit_resources(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    config = Config()
    config.bind = [f"fd://{settings['socket_fd']}"]
    config.keep_alive_timeout = settings["keep_alive_s"]
    config.loglevel = "WARNING"
    config.accesslog = None
    token = os.environ.pop(TOKEN_VARIABLE)
    confine(
        Permissions(
            writable=(settings["directory"],),
            readable=(*interpreter_roots(), "/proc/meminfo"),
            hidden=(package_root(),),
        )
    )
    asyncio.run(serve(guarded(app, token), config))


if __name__ == "__main__":
    main()
