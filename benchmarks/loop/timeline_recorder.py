"""Records what a process of a run computes and when, for `timeline.py`. The process imports it, because a `sitecustomize` does."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER, ROLES, START = "ROLLBOOK_TIMELINE", "ROLLBOOK_TIMELINE_ROLES", "start"
"""The variables that name the folder and the recorded roles, and the file whose existence starts the recording."""
POLL_S = 0.05
SITECUSTOMIZE = f"""import os, sys
if "--role" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("--role") + 1] in os.environ["{ROLES}"].split():
    import threading
    def record():
        from benchmarks.loop.timeline_recorder import record
        record(sys.orig_argv[sys.orig_argv.index("--role") + 1])
    threading.Thread(target=record, name="timeline", daemon=True).start()
"""


def record(role: str) -> None:
    """In a process of the run: wait for the start, record, and write what was found."""
    folder = Path(os.environ[FOLDER])
    while not (folder / START).exists():
        time.sleep(POLL_S)
    settings = json.loads((folder / START).read_text())
    torch = sys.modules["torch"]  # the process has imported it
    profiler, kinds = torch.profiler, torch.profiler.ProfilerActivity
    is_gpu = settings["device"] == "cuda"
    options: dict[str, Any] = {"activities": [kinds.CUDA if is_gpu else kinds.CPU]}
    if not is_gpu:
        # Without the launches of a GPU, the operations of all threads are what runs.
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profiler.profile(**options) as profile:
        began, before = time.time_ns(), thread_seconds()
        time.sleep(settings["seconds"])
        ended, after = time.time_ns(), thread_seconds()
    events = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if (event.device_type() == torch.autograd.DeviceType.CUDA) is is_gpu and event.duration_ns() > 0
    ]
    found = {
        "window": (began, ended),
        "events": [event for event in events if began <= event[1] <= ended],
        "threads": {name: seconds - before.get(name, 0.0) for name, seconds in after.items()},
    }
    partial = folder / f"{role}.partial"
    partial.write_text(json.dumps(found))
    partial.replace(folder / f"{role}.json")


def thread_seconds() -> dict[str, float]:
    """Processor seconds of the threads of this process so far. Those of a library have the name of the kernel's task."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    tick, found = os.sysconf("SC_CLK_TCK"), dict[str, float]()
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:  # it has ended
            continue
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        name = names.get(int(task.name), f"library ({name})")
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return found
