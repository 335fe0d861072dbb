"""The Slurm script on Debian's Slurm: one controller and two nodes on this machine."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.run.small import CONFIG, EXAMPLE, REPOSITORY, rollbook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT = REPOSITORY / "deploy" / "slurm.sbatch"
STEPS = 120
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={port1} CPUs=1 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={port2} CPUs=1 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment variables for the programs of a small Slurm cluster."""
    is_missing = any(shutil.which(name) is None for name in ("munged", "slurmctld", "slurmd", "sbatch"))
    if is_missing or os.getuid() != 0:
        pytest.skip("needs root, and apt-get install slurmctld slurmd slurm-client munge")
    directory = tmp_path / "slurm"
    (directory / "state").mkdir(parents=True)
    # munge refuses a socket in a directory that others may not enter.
    for folder in (directory, *directory.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    ports = {name: free_port() for name in ("port", "port1", "port2")}
    conf = directory / "slurm.conf"
    conf.write_text(SETTINGS.format(host=socket.gethostname(), directory=directory, **ports), encoding="utf-8")
    environment = {**os.environ, "SLURM_CONF": str(conf), "PYTHONPATH": str(REPOSITORY)}
    munge_files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
    munge_options = [f"--{option}={directory / name}" for option, name in munge_files.items()]
    processes = []
    for command in (
        ["munged", "--force", "--foreground", f"--key-file={key}", *munge_options],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ):
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        time.sleep(1.0)  # each one needs the one before it
    try:
        yield environment
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=environment, check=False)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def test_the_slurm_script_trains_on_two_nodes_and_may_be_submitted_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    config, run = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG, encoding="utf-8")
    for module in EXAMPLE.glob("*.py"):
        shutil.copy(module, tmp_path)
    slurm["ROLLBOOK"] = f"{sys.executable} -m rollbook"

    def submit(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["sbatch", "--wait", "--nodes=2", f"--output={tmp_path}/output", "--open-mode=append", str(SCRIPT)]
        return subprocess.run(
            [*command, str(config), str(run), *options, "--no-preflight"],
            env=slurm,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    done = submit("--set", f"trainer.max_steps={STEPS}", "--set", "env.args.step_s=0.1")
    output = (tmp_path / "output").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stderr + output
    assert "rollout-1 has joined small" in output
    assert "policy-1 has joined small" in output
    audit = json.loads(rollbook("audit", str(run), "--json").stdout)
    assert audit["ok"], audit["violations"]
    # A finished run ends at once: the job may be submitted again without harm.
    assert submit("--set", f"trainer.max_steps={STEPS}", "--set", "env.args.step_s=0.1").returncode == 0
