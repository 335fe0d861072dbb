"""`rollbook join`: a policy server, a dispatcher, an environment server or a trainer rank for a run that is running.

The run directory must be visible here: it holds the configuration, the tokens, the model and, for policy servers, the weights.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rollbook.access.guard import is_loopback
from rollbook.concurrency.child_process.process import exit_reason
from rollbook.contracts.errors import FencedError, RunError, TransientError, UsageError
from rollbook.contracts.plugin import require_libraries
from rollbook.run.config.run import LoadedConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.supervision.child_main import EXIT_FENCED, EXIT_STOP_RUN
from rollbook.run.supervision.host import ProcessStart
from rollbook.run.supervision.membership import node_name
from rollbook.run.supervision.plan import environment_of
from rollbook.run.supervision.process import SupervisedProcess
from rollbook.run.supervision.restarts import GiveUp, RestartRule
from rollbook.telemetry.events import EventLog

POLL_S = 1.0
REQUEST_S = 10.0

JoinRole = Literal["policy", "rollout", "env", "rank"]
Say = Callable[[str], None]


def join(run_dir: Path, role: JoinRole, *, host: str, name: str | None, gpus: str | None, say: Say) -> str:
    """Serve the run until it ends, stops, or a signal arrives. Returns how it ended."""
    require_libraries("torch", "transformers")
    directory = RunDirectory(run_dir.resolve())
    loaded = load_resolved_config(directory)
    _require_joinable(loaded, role, host)
    name = name or f"{role}-{node_name()}-{os.getpid()}"
    start = ProcessStart(
        name=name,
        role=role,
        directory=directory,
        addresses=running_addresses(directory),
        bind=host,
        environment={
            **environment_of(loaded.config, name, role),
            **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
        },
        ships_telemetry=loaded.config.ledger.url is None,
    ).on_another_machine()
    return asyncio.run(_Joiner(start, loaded, say).run())


def running_addresses(directory: RunDirectory) -> dict[str, str]:
    """The addresses of a run that is running."""
    try:
        found: dict[str, str] = json.loads(directory.addresses_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory.path} is not running: start it with `rollbook train`, then join it") from error
    return found


def _require_joinable(loaded: LoadedConfig, role: JoinRole, host: str) -> None:
    config = loaded.config
    if not config.cluster.has_members:
        raise UsageError("this run accepts no members: start it with cluster.allow_join = true")
    if is_loopback(config.cluster.host) != is_loopback(host):
        raise UsageError(
            f"the run listens on {config.cluster.host} (cluster.host) and this process would listen on {host}: one could not "
            "reach the other. Set both to addresses of the same network"
        )
    if role == "rollout" and config.tasks.is_posted:
        raise UsageError("this run has no dispatchers: its groups are posted by Atropos environments")
    if role == "env" and config.env.pool_size is None:
        raise UsageError(
            "only a run with env.pool_size has environment servers; in this one, workers create environments"
        )
    if role == "rank" and config.cluster.ranks == 0:
        raise UsageError(
            "this run has no trainer ranks on other machines: start it with trainer.ranks and cluster.ranks"
        )
    if role == "policy" and config.inference.engine == "vllm":
        raise UsageError("vLLM servers cannot join a run; list them in inference.urls")


class _Joiner:
    def __init__(self, start: ProcessStart, loaded: LoadedConfig, say: Say) -> None:
        self._start = start
        self._directory = start.directory
        self._loaded = loaded
        self._say = say
        self._log = EventLog(start.name, self._directory.log_file(f"join-{start.name}"))
        self._process = SupervisedProcess(start)
        self._end: str | None = None
        self._num_interrupts = 0

    async def run(self) -> str:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        watching = asyncio.create_task(self._watch_run(), name="join.watch")
        reporting = asyncio.create_task(self._say_ready(), name="join.ready")
        try:
            return await self._keep()
        finally:
            for task in (watching, reporting):
                task.cancel()
            self._process.kill()
            self._log.close()

    async def _keep(self) -> str:
        """Restart the process until the run is over. Returns how it ended."""
        rule = RestartRule(most_quick_deaths=self._loaded.config.run.most_quick_deaths)
        while True:
            code = await self._process.run()
            if self._end is not None or self._process.has_ended:
                return self._end or self._process.end_message
            if code in (EXIT_STOP_RUN, EXIT_FENCED):
                raise RunError(f"{self._start.name} stopped: {self._process.fault or 'another process has its name'}")
            verdict = rule.decide(self._process.lifetimes_s, was_ready=self._process.was_ready)
            if isinstance(verdict, GiveUp):
                raise RunError(f"{self._start.name}: {verdict.reason}. Its last output:\n{self._process.last_output()}")
            self._say(f"{self._start.name} {exit_reason(code)} and is restarted")
            await asyncio.sleep(verdict.after_s)

    async def _say_ready(self) -> None:
        await self._process.ready.wait()
        self._say(f"{self._start.name} has joined {self._loaded.config.run.name} (Ctrl-C leaves)")

    async def _watch_run(self) -> None:
        """Stop the process when the run has ended, or stopped: a resumed run has other addresses."""
        address = self._start.addresses["ledger"]
        async with open_run_ledger(self._loaded, self._directory, address, log=self._log) as ledger:
            while self._end is None:
                await asyncio.sleep(POLL_S)
                with suppress(UsageError):
                    if running_addresses(self._directory) == self._start.addresses:
                        # A ledger that stops before the addresses are removed does not respond in time.
                        with suppress(TransientError, FencedError, TimeoutError):
                            async with asyncio.timeout(REQUEST_S):
                                if (await ledger.status()).ended:
                                    self._stop("the run has ended")
                        continue
                self._stop("the run has stopped; join again when it is resumed")

    def _stop(self, end: str) -> None:
        self._end = end
        self._process.request_stop()

    def _interrupt(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._say(f"{self._start.name} finishes its work and leaves (Ctrl-C again stops at once)")
            self._end = "left the run"
            self._process.request_leave()
        else:
            self._process.kill()
