"""A process for tests of hosts: sends one message, then does what its role says. It ends with its parent."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames


def wait_for_the_test() -> None:
    threading.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("channel_fd", type=int)
    parser.add_argument("--role")
    args, _ = parser.parse_known_args()
    parent = connect_to_parent(args.channel_fd)
    die_with_parent(parent.fileno(), grace_s=0.2)
    if args.role == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.role == "drains":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if args.role == "parent" else None
    facts = {"pid": os.getpid(), "child": child and child.pid, "variable": os.environ.get("HOSTED_VARIABLE")}
    BlockingFrames(parent).send(json.dumps(facts).encode())
    if args.role == "fails":
        sys.stderr.write("first line\nthe last line\n")
        return 7
    wait_for_the_test()
    return 0


if __name__ == "__main__":
    sys.exit(main())
