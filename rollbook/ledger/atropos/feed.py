"""Feeds a run with groups that Atropos environments post, by acting as their trainer.

The Atropos server is the ledger of this run or an external one. A batch is fetched when the queue has capacity. Its groups are
submitted under ids derived from their position, so a batch that is fetched again after a crash is stored once. Lag is checked for
groups with a `policy_version`; where environments send no logprobs, set `trainer.missing_logprobs = "recompute"`.
"""

import asyncio
from typing import Any

import aiohttp
import msgspec

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import group_id
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.task import TaskId
from rollbook.ledger.atropos.codec import decode_scored_data
from rollbook.ledger.client.client import LedgerClient
from rollbook.telemetry.events import EventLog

POLL_S = 0.1
REQUEST_S = 120.0
"""One deadline for all tries of a request."""
MAX_BATCH_GROUPS = 1 << 16
"""A draw's number encodes the number of the batch and the position in it."""
FIRST_BATCH = 2
"""A registration with `starting_step = 0` continues with the next batch; a resumed feed needs the last one again."""
PAGE = 500
TASK = "atropos"


def posts_run(run: str) -> str:
    """The run in the ledger that environments post to; it is separate from the trained run."""
    return f"{run}-posts"


class AtroposFeed:
    def __init__(
        self,
        ledger: LedgerClient,
        *,
        url: str,
        batch_sequences: int,
        max_token_len: int,
        max_queued: int,
        num_steps: int | None,
        log: EventLog,
    ) -> None:
        self._ledger = ledger
        self._url = url.rstrip("/")
        self._batch_sequences = batch_sequences
        self._max_token_len = max_token_len
        self._max_queued = max_queued
        self._num_steps = num_steps
        self._log = log

    async def run(self) -> None:
        """Fetch and submit until the run is over.

        Takes:  batches, from the Atropos server.
        Gives:  groups, to the ledger.
        Waits:  for capacity in the queue; for environments to post enough.
        Ends:   when the run is over.
        """
        async with aiohttp.ClientSession() as session:
            number = max(FIRST_BATCH, await self._last_submitted())
            await self._register(session, starting_step=number - 1)
            while await self._has_capacity():
                groups = await self._fetch(session)
                if groups is None:
                    await asyncio.sleep(POLL_S)
                    continue
                await self._submit(number, groups)
                number += 1

    async def _last_submitted(self) -> int:
        """The newest batch of which a group was submitted. It is fetched again; groups already stored are ignored."""
        newest, after = 0, -1
        while page := await self._ledger.outcomes(after=after, limit=PAGE):
            newest = max([newest, *(past.number // MAX_BATCH_GROUPS for past in page if past.task_id.startswith(TASK))])
            after = page[-1].sequence
        return newest

    async def _has_capacity(self) -> bool:
        """Wait until the queue has capacity. False: the run is over."""
        while True:
            status = await self._ledger.status()
            if status.ended:
                return False
            if status.by_state.get("queued", 0) < self._max_queued:
                return True
            await asyncio.sleep(POLL_S)

    async def _register(self, session: aiohttp.ClientSession, *, starting_step: int) -> None:
        body = {
            "wandb_group": "rollbook",
            "wandb_project": "rollbook",
            "batch_size": self._batch_sequences,
            "max_token_len": self._max_token_len,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": starting_step,
            "num_steps": self._num_steps or 2**31 - 1,
        }
        await self._request(session, "POST", "/register", body)
        self._log.info("atropos.registered", url=self._url, starting_step=starting_step)

    async def _fetch(self, session: aiohttp.ClientSession) -> list[dict[str, Any]] | None:
        body = await self._request(session, "GET", "/batch", None)
        groups = body.get("batch")
        if groups is not None and len(groups) > MAX_BATCH_GROUPS:
            raise RunError(f"{self._url}/batch returned {len(groups)} groups; lower tasks.atropos.batch_sequences")
        return groups

    async def _submit(self, number: int, groups: list[dict[str, Any]]) -> None:
        for position, posted in enumerate(groups):
            env = posted.get("env_id")
            task_id = TaskId(TASK if env is None else f"{TASK}.env{env}")
            id_ = group_id(task_id, number * MAX_BATCH_GROUPS + position)
            try:
                group = decode_scored_data(msgspec.json.encode(posted), id_)
                reply = await self._ledger.submit(encode_group(group))
            except UnusableGroupError as error:
                # A fault of one environment. The group stays readable in the run it was posted to.
                self._log.warning("atropos.group_rejected", group=id_, cause=str(error))
                continue
            self._log.debug("atropos.group_submitted", group=id_, receipt=reply.receipt)

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        deadline = Deadline(REQUEST_S, f"Atropos {method} {path}")

        async def attempt() -> dict[str, Any]:
            try:
                async with session.request(
                    method, f"{self._url}{path}", json=body, timeout=aiohttp.ClientTimeout(total=deadline.remaining_s())
                ) as response:
                    if response.status >= 500:
                        raise TransientError(f"{self._url}{path} returned {response.status}: {await response.text()}")
                    if response.status != 200:
                        raise RunError(f"{self._url}{path} returned {response.status}: {await response.text()}")
                    reply = await response.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise TransientError(f"{self._url}{path}: {type(error).__name__}: {error}") from error
            if not isinstance(reply, dict):
                raise RunError(f"{self._url}{path} returned {reply!r}; is it an Atropos server?")
            return reply

        return await retry(attempt, on=TransientError, deadline=deadline)
