"""Places processes of a run on the nodes of a Ray cluster. Only this module and `ray_nodes.py` import ray.

Ray places and watches; it carries no data. One actor for each process starts it as a child on its node and relays its reports.
Completions, groups and weights go over HTTP, as on one machine. Actors are not restarted by Ray: the supervisor decides. They end
with this process, and their children end with them.
"""

import asyncio
import logging
import os
import platform
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib import metadata
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rollbook.access.guard import is_loopback
from rollbook.concurrency.child_process.process import KILL_S, ChildEndedError, exit_reason
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.run.config.cluster import RayConfig
from rollbook.run.supervision.host import HostedProcess, LocalHost, ProcessStart
from rollbook.telemetry.events import EventLog

PLACE_S = 300.0
"""How long Ray may take to find a node for a process and to start the actor there: minutes on a node that is busy or new."""
PLACE_WARN_S = 30.0
STACK_S = 10.0
COMPARED = ("torch", "transformers", "rollbook")
"""Packages whose versions must agree on all machines of a run."""
LOST = -int(signal.SIGKILL)
"""The exit code of a process whose node or actor is lost."""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in COMPARED:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@ray.remote(max_restarts=0, max_task_retries=0)
class _ProcessActor:
    """Runs on the node: one child process."""

    def __init__(self) -> None:
        self._child: HostedProcess | None = None

    async def facts(self) -> dict[str, Any]:
        return {"versions": versions(), "ip": ray.util.get_node_ip_address(), "node": platform.node()}

    async def start(self, process: ProcessStart) -> int:
        self._child = await LocalHost().start(process.on_another_machine())
        return self._child.pid

    async def receive(self) -> list[bytes] | None:
        """The next message; None when the process is gone."""
        try:
            return [await self._running().receive()]
        except ChildEndedError:
            return None

    async def ended(self) -> tuple[int, str]:
        """The exit code and the last lines."""
        child = self._running()
        return await child.ended(), child.last_output()

    async def send_signal(self, number: int) -> None:
        self._running().send_signal(signal.Signals(number))

    async def kill(self) -> None:
        if self._child is not None:
            await self._child.kill()

    async def stack(self) -> str:
        return await self._running().stack()

    def _running(self) -> HostedProcess:
        if self._child is None:
            raise RuntimeError("the process was not started")
        return self._child


class RayProcess:
    """A process on a node of the cluster. Satisfies `HostedProcess`."""

    def __init__(self, actor: Any, pid: int, *, name: str, node: str, log: EventLog) -> None:
        self.pid = pid
        self.node = node
        self._actor = actor
        self._name = name
        self._log = log
        self._received_at = time.monotonic()
        self._code: int | None = None
        self._last_output = ""
        # Reports are small and arrive about once a second.
        self._reports: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._relay = asyncio.create_task(self._receive_reports(), name=f"ray.reports.{name}")
        self._exit = asyncio.create_task(self._await_exit(), name=f"ray.exit.{name}")

    @property
    def is_alive(self) -> bool:
        return self._code is None

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._received_at

    async def receive(self) -> bytes:
        report = await self._reports.get()
        if report is None:
            self._reports.put_nowait(None)
            code = await self.ended()
            raise ChildEndedError(exit_reason(code))
        return report

    async def ended(self) -> int:
        return await asyncio.shield(self._exit)

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            self._actor.send_signal.remote(int(number))

    def send_kill(self) -> None:
        self._actor.kill.remote()

    async def stop(self, *, grace_s: float) -> bool:
        self.send_signal(signal.SIGTERM)
        await asyncio.wait({self._exit}, timeout=grace_s)
        is_graceful = not self.is_alive
        await self.kill()
        return is_graceful

    async def kill(self) -> None:
        if self.is_alive:
            self.send_kill()
            await asyncio.wait({self._exit}, timeout=KILL_S)
        self._relay.cancel()
        # Frees the resources of the node; a child that is still alive ends with the actor.
        ray.kill(self._actor)
        await asyncio.wait({self._exit}, timeout=KILL_S)

    async def stack(self) -> str:
        try:
            async with asyncio.timeout(STACK_S):
                return str(await self._actor.stack.remote())
        except (RayError, TimeoutError) as error:
            return f"its node {self.node} does not respond ({type(error).__name__})"

    def last_output(self, max_lines: int = 40) -> str:
        return "\n".join(self._last_output.splitlines()[-max_lines:])

    async def _receive_reports(self) -> None:
        """Ends: with the process, or with its actor."""
        try:
            while (reports := await self._actor.receive.remote()) is not None:
                self._received_at = time.monotonic()
                for report in reports:
                    self._reports.put_nowait(report)
        except RayError as error:
            self._log.info("run.ray_relay_ended", process=self._name, node=self.node, cause=type(error).__name__)
        finally:
            self._reports.put_nowait(None)

    async def _await_exit(self) -> int:
        try:
            self._code, self._last_output = await self._actor.ended.remote()
        except RayActorError:
            self._code = LOST
            self._last_output = f"its node {self.node} or its Ray actor was lost"
            self._log.warning("run.node_lost", process=self._name, node=self.node)
        except RayError as error:
            self._code, self._last_output = LOST, str(error)
        return self._code


class RayHost:
    """Satisfies `ProcessHost`. Made by `open_ray_host`."""

    def __init__(self, config: RayConfig, *, log: EventLog) -> None:
        self._config = config
        self._log = log

    def awaits(self, process: ProcessStart) -> str:
        return ""

    async def start(self, process: ProcessStart) -> HostedProcess:
        """Raises `WorkerError` if no node has the resources, or if the node has other versions."""
        options = self._config.options(process.role)
        remote_class: Any = _ProcessActor  # the decorator adds `options`
        actor = remote_class.options(**options).remote()
        try:
            facts = await self._facts(actor, process, options)
            _require_equal(facts["node"], facts["versions"], versions())
            if process.bind is not None and not is_loopback(process.bind):
                process = replace(process, bind=str(facts["ip"]))
            pid = int(await actor.start.remote(process))
        except RayError as error:
            ray.kill(actor)
            raise WorkerError(f"{process.name} could not be started by Ray: {_cause(error)}") from error
        except BaseException:
            ray.kill(actor)
            raise
        self._log.info("run.process_placed", process=process.name, node=facts["node"], ip=facts["ip"], pid=pid)
        return RayProcess(actor, pid, name=process.name, node=str(facts["node"]), log=self._log)

    async def _facts(self, actor: Any, process: ProcessStart, options: Mapping[str, float]) -> dict[str, Any]:
        def free() -> dict[str, float]:
            return {name: ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU", "memory")}

        def warn() -> None:
            self._log.warning("run.process_waits_for_node", process=process.name, needs=dict(options), free=free())

        warning = asyncio.get_running_loop().call_later(PLACE_WARN_S, warn)
        try:
            async with asyncio.timeout(PLACE_S):
                found: dict[str, Any] = await actor.facts.remote()
                return found
        except (TimeoutError, GetTimeoutError) as error:
            raise WorkerError(
                f"Ray found no node for {process.name} within {PLACE_S:g} s: it needs {dict(options)}, and {free()} are free. "
                "Lower cluster.ray, or add a node"
            ) from error
        finally:
            warning.cancel()


def _require_equal(node: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    different = [
        f"{name} {theirs.get(name, 'missing')}, not {ours[name]}" for name in ours if theirs.get(name) != ours[name]
    ]
    if different:
        raise WorkerError(
            f"the node {node} has other versions than this machine: {'; '.join(different)}. Install the same"
        )


def _cause(error: RayError) -> str:
    """The last line: the rest is the traceback of the actor."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@asynccontextmanager
async def open_ray_host(config: RayConfig, *, log: EventLog) -> AsyncIterator[RayHost]:
    """Connect to the cluster at `config.address`, or start one on this machine (`auto`)."""
    await asyncio.to_thread(connect, config)
    log.info("run.ray_connected", address=config.address, nodes=len([n for n in ray.nodes() if n["Alive"]]))
    try:
        yield RayHost(config, log=log)
    finally:
        await asyncio.to_thread(ray.shutdown)


def connect(config: RayConfig) -> None:
    """Connect this process to the cluster. Raises `RunError` if it cannot be reached or requires no token."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if config.address == "auto":
        quiet["include_dashboard"] = False
        # Ray runs workers at a low priority, and a busy machine would starve the processes of the run.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=None if config.address == "auto" else config.address, **quiet)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(f"the Ray cluster at {config.address} cannot be used: {error}") from error
    # Ray turns it on by itself when it starts a cluster, unless the variable says otherwise.
    if os.environ.get("RAY_AUTH_MODE") != "token":
        ray.shutdown()
        raise RunError(
            f"the Ray cluster at {config.address} requires no token: every program that reaches its ports could run commands on "
            "its nodes. Start it with RAY_AUTH_MODE=token, and set the variable here too"
        )
