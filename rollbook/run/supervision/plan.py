"""The processes of a run: their roles, listening sockets, addresses and environment variables."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rollbook.concurrency.child_process.template import EarlyTemplate, ProcessTemplate, early_template
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import UsageError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import ENGINES
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory, machine_directory
from rollbook.run.policy_clients import join_urls
from rollbook.run.resources.mps import mps_environment, without_mps
from rollbook.run.supervision.child_main import ROLES
from rollbook.run.supervision.host import ProcessStart
from rollbook.sandbox.quota import quota_variable
from rollbook.telemetry.events import EventLog

LOCAL = "127.0.0.1"
DASHBOARD_PORT = 8686
"""The same each time, so that a bookmark works. If it is in use, the kernel chooses another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    starts: Sequence[ProcessStart]
    """In the order in which they are started: servers before their clients."""
    addresses: Mapping[str, str]
    """URLs of the servers by role."""
    sockets: Sequence[socket.socket]

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def plan_run(
    config: RunConfig, directory: RunDirectory, *, has_trainer: bool = True, dashboard: socket.socket | None = None
) -> RunPlan:
    """Opens the listening sockets, apart from that of the dashboard, which is optional. The caller closes the plan."""
    policies = replica_names(config.inference)
    own_ledger = ["ledger"] if config.ledger.url is None else []
    servers = [*own_ledger, *policies, *(["env"] if config.env.pool_size is not None else [])]
    binds_own_port = policies if config.inference.engine == "vllm" else []
    # Atropos environments are configured with the ledger's address before it runs.
    fixed = {"ledger": config.tasks.atropos.port} if config.tasks.is_posted and not config.tasks.atropos.url else {}
    host = config.cluster.host
    sockets = {name: listening_socket(host, fixed.get(name, 0)) for name in servers if name not in binds_own_port}
    if dashboard is not None:
        sockets["dashboard"] = dashboard
    addresses = {name: url_of(sock) for name, sock in sockets.items() if name not in policies}
    replicas = {name: url_of(sockets[name]) if name in sockets else free_url() for name in policies}
    if config.ledger.url is not None:
        addresses["ledger"] = config.ledger.url
    addresses["policy"] = join_urls(config.inference.urls or list(replicas.values()))
    has_base, has_mps = has_trainer and config.resources.shared_base, bool(config.resources.mps)
    mapping = {*policies, "trainer"} if has_base else set[str]()
    names = [
        *(["mps"] if has_mps else []),
        *(["base"] if has_base else []),
        *servers,
        *(["trainer"] if has_trainer else []),
        "rollout",
        *(["evaluation"] if config.evaluation.every_steps else []),
        *(["dashboard"] if dashboard is not None else []),
    ]
    roles = dict.fromkeys(policies, "vllm" if config.inference.engine == "vllm" else "policy")
    starts = [
        ProcessStart(
            name=name,
            role=roles.get(name, name),
            directory=directory,
            addresses={**addresses, "own": replicas[name]} if name in replicas else addresses,
            listening=sockets.get(name),
            environment=environment_of(config, directory, name, roles.get(name, name)),
            shared_base=directory.shared_base_file if name in mapping else None,
            needs=(
                *(("mps",) if has_mps and name in (*policies, "trainer", "base") else ()),
                *(("base",) if name in mapping else ()),
            ),
        )
        for name in names
    ]
    return RunPlan(starts=starts, addresses=addresses, sockets=list(sockets.values()))


def open_dashboard_socket(host: str, port: int | None) -> socket.socket:
    """The chosen port; without one, the usual port or, if that is in use, any free one."""
    try:
        return listening_socket(host, DASHBOARD_PORT if port is None else port)
    except OSError as error:
        if port is None:
            return listening_socket(host, 0)
        raise UsageError(
            f"the dashboard cannot listen on {host}:{port}: {error.strerror}; choose another port with --port"
        ) from error


def environment_of(config: RunConfig, directory: RunDirectory, name: str, role: str) -> dict[str, str]:
    """Threads, GPUs, MPS server and quota of sandboxes of a process. GPUs and MPS are for processes of the plan only."""
    inference, trainer = config.inference.threads, config.trainer.threads
    threads = {"policy": inference, "vllm": inference, "trainer": trainer, "rank": trainer}
    policies = replica_names(config.inference)
    gpus = tuple[int, ...]()
    if name in policies:
        gpus = config.resources.of_replica(policies.index(name), len(policies))
    elif name in ("trainer", "base"):
        gpus = config.resources.trainer_gpus
    found = {"OMP_NUM_THREADS": str(threads.get(role, 1)), "TOKENIZERS_PARALLELISM": "false"}
    if config.sandbox.is_limited:
        found |= quota_variable(config.sandbox, machine_directory(directory.id, "sandboxes") / "quota")
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if config.resources.mps and name in (*policies, "trainer", "base"):
        found |= mps_environment(directory, gpus, is_trainer=name == "trainer")
    return found


def start_without_mps(start: ProcessStart, config: RunConfig) -> ProcessStart:
    """Of a client whose MPS server was given up."""
    environment = environment_of(without_mps(config), start.directory, start.name, start.role)
    return replace(start, environment=environment, needs=tuple(name for name in start.needs if name != "mps"))


@contextmanager
def template_of(config: RunConfig, early: EarlyTemplate | None = None) -> Iterator[EarlyTemplate | None]:
    """The process template of a run with a trainer, started before the run is checked: its imports take longer than the checks.

    `early`: one that was started before the settings were known. It is closed if they need none.
    """
    modules = template_modules(config, has_trainer=True) if config.run.process_template else []
    if early is None:
        with early_template(modules) as started:
            yield started
    elif modules:
        yield early
    else:
        early.close()
        yield None


def process_template(
    config: RunConfig,
    directory: RunDirectory,
    *,
    has_trainer: bool,
    log: EventLog,
    on_change: Callable[[], None],
    early: EarlyTemplate | None = None,
) -> ProcessTemplate | None:
    """None if no process of the run needs it, or `run.process_template` is off. `early`: see `template_of`."""
    modules = template_modules(config, has_trainer=has_trainer)
    if not modules or not config.run.process_template:
        return None

    def on_event(event: str, fields: dict[str, object]) -> None:
        log.info(f"run.{event}", **fields)
        on_change()

    return ProcessTemplate(modules, output=directory.stderr_file("template"), on_event=on_event, early=early)


def template_modules(config: RunConfig, *, has_trainer: bool) -> list[str]:
    """What the process template of a run imports: the modules of its processes. Empty if none of them needs torch."""
    has_engine = config.inference.engine == "transformers" and not config.inference.urls
    heavy = [
        *(["rollbook.run.processes.trainer", "rollbook.trainer.model.model_directory"] if has_trainer else []),
        *([ROLES["base"]] if has_trainer and config.resources.shared_base else []),
        *([ENGINES["transformers"].partition(":")[0]] if has_engine else []),
    ]
    light = [ROLES[role] for role in ("ledger", "policy", "rollout")]
    light += ["rollbook.rollout.workers.main", "rollbook.run.processes.rollout_worker"]
    return [*heavy, *light] if heavy else []


def replica_names(config: InferenceConfig) -> list[str]:
    """`policy`, `policy-1`, `policy-2`, ...; none if the servers run elsewhere."""
    if config.urls:
        return []
    return ["policy", *(f"policy-{number}" for number in range(1, config.replicas))]


def free_url() -> str:
    """An address for a server that binds its port itself, as vLLM does. Other servers get an open socket."""
    with socket.create_server((LOCAL, 0)) as probe:
        return f"http://{LOCAL}:{probe.getsockname()[1]}"
