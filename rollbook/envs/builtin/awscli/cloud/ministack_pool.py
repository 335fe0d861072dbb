"""`MiniStackPool`: simulated clouds for code that cannot await. Any thread may acquire and release.

with MiniStackPool(8) as pool:
    port = pool.acquire()                       # PoolExhaustedError, a RuntimeError, if all eight are acquired
    ...                                         # boto3.client("s3", endpoint_url=pool.endpoint(port))
    pool.release(port)                          # wiped and checked before it is lent again
"""

import threading
from types import TracebackType
from typing import Self

from rollbook.concurrency.blocking import LoopThread
from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError
from rollbook.envs.builtin.awscli.cloud.backend import CloudPool, SimulatedCloud, open_cloud_pool
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.sandboxes.pool import Lease, PoolExhaustedError
from rollbook.telemetry.events import EventLog

WIPE_S = 60.0
"""Longest wait for a simulator that was released and is wiped, or replaced."""


class MiniStackPool:
    """`size` simulators, all started when the constructor returns. Simulator i listens on `base_port` + i; 0: any free ports."""

    def __init__(self, size: int = 1, *, base_port: int = 4566, log: EventLog | None = None) -> None:
        self._config = AwsCliConfig(pool_size=size, base_port=base_port)
        self._log = log or EventLog("ministack")
        self._loop = LoopThread("ministack-pool")
        self._lock = threading.Lock()
        self._leases: dict[int, Lease[SimulatedCloud]] = {}
        self._acquiring = 0
        try:
            self._pool: CloudPool = self._loop.enter(open_cloud_pool(self._config, log=self._log))
        except BaseException:
            self._loop.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        return self._config.pool_size

    @property
    def ports_in_use(self) -> list[int]:
        with self._lock:
            return sorted(self._leases)

    @property
    def free_count(self) -> int:
        """Simulators that nobody has acquired. Some may still be wiped."""
        with self._lock:
            return self._config.pool_size - len(self._leases) - self._acquiring

    def acquire(self, timeout_s: float | None = None) -> int:
        """The port of a simulator that no other caller has.

        Raises `PoolExhaustedError` at once if all are acquired; with a timeout, if none is released in that time. Waits for a
        simulator that is still being wiped.
        """
        with self._lock:
            if timeout_s is None and len(self._leases) + self._acquiring >= self._config.pool_size:
                raise PoolExhaustedError(
                    f"MiniStack pool exhausted: all {self._config.pool_size} simulators are acquired; release one, make the pool "
                    "larger, or wait with acquire(timeout_s=…)"
                )
            self._acquiring += 1
        try:
            deadline = Deadline(WIPE_S if timeout_s is None else timeout_s, "MiniStackPool.acquire")
            lease = self._loop.run(self._pool.acquire(deadline))
            with self._lock:
                self._leases[lease.sandbox.port] = lease
        finally:
            with self._lock:
                self._acquiring -= 1
        return lease.sandbox.port

    def release(self, port: int) -> None:
        """Give a simulator back. It is wiped and checked in the background."""
        with self._lock:
            lease = self._leases.pop(port, None)
        if lease is None:
            raise RunError(f"port {port} is not acquired; acquired are {self.ports_in_use or 'none'}")
        self._loop.call(lease.release)

    def endpoint(self, port: int) -> str:
        """The `--endpoint-url` of a simulator."""
        return f"http://127.0.0.1:{port}"

    def close(self) -> None:
        """Stop all simulators. A second call does nothing."""
        self._loop.stop()
