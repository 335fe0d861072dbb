"""Observes a run and changes the number of its additional processes by the rule of `scale.py`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import MemberRole
from rollbook.contracts.errors import TransientError
from rollbook.inference.client.server_protocol import RollbookProtocol
from rollbook.inference.connection import PolicyConnection, open_connection
from rollbook.ledger.client.client import LedgerClient
from rollbook.run.config.cluster import AutoscaleConfig
from rollbook.run.config.run import LoadedConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import client_token, member_source, open_run_ledger
from rollbook.run.policy_clients import policy_urls
from rollbook.run.supervision.scale import LoadSample, Scale, Streak, decide
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.json_tail import JsonTail

STATUS_S = 5.0
"""For one observation: a server that does not respond is left out."""


class RunObserver:
    """Reads what the rule needs: the ledger's status, the trainer's waiting, the load of the policy servers."""

    def __init__(
        self,
        ledger: LedgerClient,
        *,
        replicas: Sequence[str],
        metrics_file: Path,
        groups_per_step: int,
        window_s: float,
        token: str | None = None,
    ) -> None:
        """`replicas`: the policy servers of the plan. `window_s`: the steps of this time count for the trainer's waiting."""
        self._ledger = ledger
        self._groups_per_step = groups_per_step
        self._window_s = window_s
        self._clock = SystemClock()
        self._replicas = member_source(ledger, MemberRole.POLICY, replicas)
        self._token = token
        self._metrics = JsonTail(metrics_file)
        self._steps: deque[tuple[float, float, float]] = deque()
        """Time of a step, seconds that it waited for its batch, seconds of the whole step."""
        self._stack = AsyncExitStack()
        self._connections: dict[str, PolicyConnection] = {}
        self._protocol = RollbookProtocol()

    async def close(self) -> None:
        await self._stack.aclose()

    async def observe(self) -> LoadSample:
        """Raises `TransientError` if the ledger does not respond."""
        status = await self._ledger.status()
        loads = [load for load in await asyncio.gather(*map(self._load, await self._replicas())) if load is not None]
        queued = status.counts.queued / self._groups_per_step
        return LoadSample(
            trainer_wait=self._trainer_wait(queued),
            gate_free=status.capacity,
            queued_batches=queued,
            policy_load=sum(loads) / len(loads) if loads else 0.0,
            num_policies=len(loads),
        )

    def _trainer_wait(self, queued_batches: float) -> float:
        for row in self._metrics.poll():
            if row.get("process") == "trainer" and row.get("perf/step_time"):
                self._steps.append((row["time"], row.get("perf/sample_wait_time") or 0.0, row["perf/step_time"]))
        while self._steps and self._steps[0][0] < self._clock.wall() - self._window_s:
            self._steps.popleft()
        if not self._steps:
            # No step in the whole window: the trainer waits, unless a batch is ready.
            return 1.0 if queued_batches < 1 else 0.0
        return min(1.0, sum(wait for _, wait, _ in self._steps) / sum(whole for _, _, whole in self._steps))

    async def _load(self, url: str) -> int | None:
        if url not in self._connections:
            opened = open_connection(url, max_connections=1, api_key=self._token)
            self._connections[url] = await self._stack.enter_async_context(opened)
        try:
            async with asyncio.timeout(STATUS_S):
                return (await self._protocol.status(self._connections[url])).load
        except (TransientError, TimeoutError):
            return None


class Autoscaler:
    def __init__(
        self,
        config: AutoscaleConfig,
        directory: RunDirectory,
        observer: RunObserver,
        *,
        log: EventLog,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._observer = observer
        self._clock = SystemClock()
        self._log = log
        self._say = say

    async def run(self) -> None:
        """Change `scale.json` when the rule says so.

        Takes:  observations of the run, and the current numbers.
        Gives:  numbers, to `ExtraProcesses`.
        Waits:  `interval_s` between observations.
        Ends:   on cancellation.
        """
        streak = Streak()
        while True:
            await self._clock.sleep(self._config.interval_s)
            before = Scale.read(self._directory) or Scale()
            try:
                seen = await self._observer.observe()
            except TransientError as error:
                self._log.warning("run.autoscale_blind", cause=str(error))
                continue
            finding = streak.finding
            scale, streak = decide(self._config, before, seen, streak, now=self._clock.now())
            if scale != before:
                scale.write(self._directory)
                self._log.info(
                    "run.autoscaled",
                    finding=finding,
                    before=before.as_dict(),
                    after=scale.as_dict(),
                    trainer_wait=round(seen.trainer_wait, 3),
                    gate_free=seen.gate_free,
                    policy_load=round(seen.policy_load, 1),
                )
                self._say(f"autoscaler: {finding.replace('_', ' ')}; additional processes now {scale.as_dict()}")


@asynccontextmanager
async def open_autoscaler(
    loaded: LoadedConfig,
    directory: RunDirectory,
    addresses: Mapping[str, str],
    *,
    log: EventLog,
    say: Callable[[str], None],
) -> AsyncIterator[Autoscaler]:
    config = loaded.config
    async with open_run_ledger(loaded, directory, addresses["ledger"], log=log) as ledger:
        observer = RunObserver(
            ledger,
            replicas=policy_urls(addresses["policy"]),
            metrics_file=directory.metrics_file,
            groups_per_step=config.gate.groups_per_step,
            window_s=config.cluster.autoscale.hold_s,
            token=client_token(config, directory),
        )
        try:
            yield Autoscaler(config.cluster.autoscale, directory, observer, log=log, say=say)
        finally:
            await observer.close()
