"""A role of a run that does nothing until it is stopped. It is ready when the file `ready-ROLE` is in the run directory.

With the file `dies-ROLE`, it dies when it should stop; the file is removed, so that its successor stops. With the file
`crashes-ROLE`, it reports the text of the file as its error and exits, once it is ready. With the file `faults-ROLE`, it does the
same when it should stop.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.run.directory import RunDirectory
from rollbook.run.resources.mps import become_client
from rollbook.run.supervision.channel import Channel
from rollbook.run.supervision.exits import EXIT_STOP_RUN


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parser = argparse.ArgumentParser()
    parser.add_argument("channel_fd", type=int)
    parser.add_argument("--role")
    parser.add_argument("--run-dir", type=Path)
    args, _ = parser.parse_known_args()
    parent = connect_to_parent(args.channel_fd)
    die_with_parent(parent.fileno(), grace_s=0.2)
    become_client(RunDirectory(args.run_dir))
    channel = Channel(BlockingFrames(parent))
    is_ready = is_stopped = False
    while not is_stopped:
        if not is_ready and (args.run_dir / f"ready-{args.role}").exists():
            is_ready = True
            channel.ready()
        crashes = args.run_dir / f"crashes-{args.role}"
        if is_ready and crashes.exists():
            channel.fault(crashes.read_text(encoding="utf-8"))
            return 1
        is_stopped = signal.sigtimedwait({signal.SIGTERM}, 0.05) is not None
    dies = args.run_dir / f"dies-{args.role}"
    if dies.exists():
        dies.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    faults = args.run_dir / f"faults-{args.role}"
    if faults.exists():
        channel.fault(faults.read_text(encoding="utf-8"))
        return EXIT_STOP_RUN
    channel.stopped("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
