"""Stands in for NVIDIA's MPS: `install` writes the control program and its server, which do the same without a GPU.

Worse than the real one where that is unknown: a server has a session of its own, and lives on when its control program is killed.
The variable STAND_IN of the control program makes it fail: `dies`, or `no_server`. A file `fault` next to its sockets stands for an
error of a client on the GPU.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"


def install(folder: Path) -> dict[str, str]:
    """The environment with which the program is found."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONTROL, SERVER):
        path = folder / name
        path.write_text(f"#!{sys.executable} -S\n{Path(__file__).read_text(encoding='utf-8')}", encoding="utf-8")
        path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def _control(place: Path) -> None:
    failure = os.environ.get("STAND_IN", "")
    if failure == "dies":
        sys.exit("An instance of this daemon is already running")
    servers: list[subprocess.Popen[bytes]] = []
    with socket.socket(socket.AF_UNIX) as listening, (place / "control.log").open("a") as log:
        listening.bind(str(place / "control"))
        listening.listen()
        (place / f"{CONTROL}.pid").write_text(f"{os.getpid()}\n")
        while True:
            connection, _ = listening.accept()
            with connection:
                command = connection.recv(1000).decode().split()
                print(*command, file=log, flush=True)
                servers = [server for server in servers if server.poll() is None]
                reply = ""
                if command[0] == "start_server" and failure == "no_server":
                    print("no GPU would take it", file=log, flush=True)
                elif command[0] == "start_server" and not servers:
                    servers.append(subprocess.Popen([str(Path(sys.argv[0]).with_name(SERVER))], start_new_session=True))
                elif command[0] == "get_server_list":
                    reply = "".join(f"{server.pid}\n" for server in servers)
                elif command[0] == "get_server_status":
                    reply = "FAULT\n" if (place / "fault").exists() else "ACTIVE\n"
                elif command[0] == "quit":
                    for server in servers:
                        server.terminate()
                        server.wait()
                    return
                connection.sendall(reply.encode())


def _command(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(place / "control"))
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        connection.sendall(sys.stdin.buffer.read())
        while reply := connection.recv(1000):
            sys.stdout.buffer.write(reply)


def main() -> None:
    place = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    if Path(sys.argv[0]).name == SERVER:
        signal.pause()
    elif sys.argv[1:] == ["-f"]:
        _control(place)
    elif not sys.argv[1:]:
        _command(place)
    else:
        sys.exit(f"unknown arguments: {sys.argv[1:]}")


if __name__ == "__main__":
    main()
