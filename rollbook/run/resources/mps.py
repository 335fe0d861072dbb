"""The MPS server of a run: its program, its sockets, the processes that use it; and servers of other programs."""

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory, machine_directory
from rollbook.run.resources.machine import driver_gpus, visible

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS, DEVICES = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
PRIORITY, BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where CUDA looks for a server if `PIPES` is not set."""
OPTIONAL_MPS = "optional"
"""The value of `resources.mps` for a server without which the run goes on."""
PID_FILE = f"{PROGRAM}.pid"
CLIENTS = "clients"
"""A file next to the sockets of a run's server, which every client locks as long as it lives. The process table does not tell: a
process that is forked from the template has the environment of the template there."""
COMMAND = PROGRAM[:15]
"""The kernel's name of the control program and of its servers (`nvidia-cuda-mps-server`), which it cuts."""
MAX_DIRECTORY_CHARS = 80
"""A Unix socket path has at most 107 characters, and the longest name of a socket of MPS has 18."""
HOW_TO_INSTALL = (
    "It comes with NVIDIA's driver: on Ubuntu in the package nvidia-compute-utils, in containers with"
    " NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)


def mps_directory(directory: RunDirectory) -> Path:
    """Sockets and logs of the run's server. The same one after a restart and after a resume on this machine."""
    return machine_directory(directory.id, "mps")


def mps_environment(directory: RunDirectory, gpus: Sequence[int], *, is_trainer: bool = False) -> dict[str, str]:
    """What a process needs to use the run's server. `gpus`: its own; empty: all.

    The kernels of a decode step are short and depend on each other. Without a lower priority of the trainer, each of them waits for
    thread blocks of a training pass, and the trainer then waits for its next batch.
    """
    place = str(mps_directory(directory))
    return {PIPES: place, LOGS: place, **({PRIORITY: BELOW_NORMAL} if is_trainer else {}), **mps_devices(gpus)}


def without_mps(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"resources": config.resources.model_copy(update={"mps": False})})


def mps_devices(gpus: Sequence[int]) -> dict[str, str]:
    """The GPUs by identity: an MPS server counts those that it sees itself, so numbers mean other GPUs for it than for its clients.
    Nothing if there is only one."""
    found, inherited = list(driver_gpus()), os.environ.get(DEVICES)
    if inherited is None and len(found) < 2:
        return {}
    names = [gpu.uuid for gpu in visible(found, inherited) if not gpus or gpu.number in gpus]
    return {DEVICES: ",".join(names)} if names else {}


def why_no_sockets() -> str | None:
    """Why sockets of a server cannot be made for a run on this machine, or None."""
    longest = len(str(Path(tempfile.gettempdir()) / f"rollbook-{os.geteuid()}")) + len(f"/{'0' * 32}-mps")
    if longest <= MAX_DIRECTORY_CHARS:
        return None
    return (
        f"the directory of its sockets, below {tempfile.gettempdir()}, would have {longest} characters, and paths of Unix sockets"
        f" allow {MAX_DIRECTORY_CHARS}. Set TMPDIR to a shorter directory, such as /tmp"
    )


def other_server(environment: Mapping[str, str]) -> str | None:
    """An MPS server that processes started with this environment would use, in words. None: none was found.

    Only files and the process table are read: a connection could start a server.
    """
    place = Path(environment.get(PIPES) or DEFAULT_PIPES)
    where = f"{PIPES}={place}" if environment.get(PIPES) else f"in {place}"
    with suppress(OSError, ValueError):
        pid = int((place / PID_FILE).read_text(encoding="ascii"))
        if is_program(pid):
            return f"an MPS server of another program runs here ({where}, pid {pid})"
    if environment.get(PIPES):
        return f"an MPS server of another program is configured ({where}; no process of it is visible here)"
    return None


def mps_lines(is_own: bool) -> list[str]:
    """How processes of a run share a GPU, for its table. Nothing if they take turns, as without MPS. `is_own`: `resources.mps`."""
    other = other_server(os.environ)
    if not is_own:
        if other is None:
            return []
        return [f"mps: {other}; processes of this run use it. The run did not start it and does not stop it"]
    text = f"mps: a server of this run ({program() or PROGRAM}), for trainer, policy servers and shared base"
    return [text if other is None else f"{text}; {other}, which this run does not use and leaves alone"]


def programs_of(place: Path) -> list[int]:
    """The control program and the servers that use this directory for their sockets, and commands to them."""
    return [pid for pid in _users_of(place) if is_program(pid)]


def become_client(directory: RunDirectory) -> None:
    """Called at the start of each process of a run: the run's server ends after those that use it."""
    if PIPES in os.environ and os.environ[PIPES] == str(place := mps_directory(directory)):
        with suppress(OSError):  # the server has ended meanwhile, and the supervisor ends this process
            # Held until this process has ended, however it ends.
            fcntl.flock(os.open(place / CLIENTS, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)


def has_clients(place: Path) -> bool:
    with suppress(FileNotFoundError), (place / CLIENTS).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def kill_programs(place: Path) -> list[int]:
    """SIGKILL to all of them. Returns their pids."""
    found = programs_of(place)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def remove_server(directory: RunDirectory) -> None:
    """End what is left of the run's server if its owner was killed: a server may be in a process group of its own."""
    place = mps_directory(directory)
    kill_programs(place)
    shutil.rmtree(place, ignore_errors=True)


def is_program(pid: int) -> bool:
    """Whether a process of this number is a control program or a server, of whatever MPS."""
    return _command(pid) == COMMAND


def program() -> str | None:
    return shutil.which(PROGRAM)


def _users_of(place: Path) -> Iterator[int]:
    variable = f"{PIPES}={place}".encode()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if folder.name.isdigit() and variable in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _command(pid: int) -> str:
    """The kernel's name of a process; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    name, _, rest = fields.partition("(")[2].rpartition(")")
    return "" if rest.split()[0] == "Z" else name
