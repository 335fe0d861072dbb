"""Groups that environments of Atropos posted, taken over into a run of ours: we are the trainer that they believe to post for.

The server is the ledger of this run, or one elsewhere. A batch is fetched when the run has room for it, and its groups are
submitted under ids made of their place, so a batch that is fetched again after a crash is stored once. Versions are unknown: lag
is not judged, and a trainer that needs logprobs wants `trainer.missing_logprobs = "recompute"` where environments send none.
"""

import asyncio
from typing import Any

import aiohttp
import msgspec

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import GroupId, group_id
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.task import TaskId
from rollbook.ledger.atropos.codec import decode_scored_data
from rollbook.ledger.client.client import LedgerClient
from rollbook.tasks.config import AtroposSourceConfig
from rollbook.telemetry.events import EventLog

POLL_S = 0.1
REQUEST_S = 120.0
"""A server that cannot be reached for this long is gone. One deadline, all tries together."""
PLACES = 1 << 16
"""Groups of one fetched batch at most: a draw's number holds the batch and the place in it."""
PAGE = 500
TASK = "atropos"


def posts_run(run: str) -> str:
    """The run of the ledger that environments post to, beside the one that is trained."""
    return f"{run}-posts"


class AtroposSource:
    def __init__(
        self,
        ledger: LedgerClient,
        *,
        url: str,
        config: AtroposSourceConfig,
        most_queued: int,
        num_steps: int | None,
        log: EventLog,
    ) -> None:
        self._ledger = ledger
        self._url = url.rstrip("/")
        self._config = config
        self._most_queued = most_queued
        self._num_steps = num_steps
        self._log = log

    async def run(self) -> None:
        """Fetch and submit until the run is over.

        Takes:  batches, from the Atropos server.
        Gives:  groups, to the ledger.
        Waits:  for room in the queue; for environments to post enough.
        Ends:   when the ledger says that the run is over.
        """
        async with aiohttp.ClientSession() as session:
            number = await self._last_submitted()
            await self._register(session, starting_step=max(0, number - 1))
            number = max(1, number)
            while await self._has_room():
                groups = await self._fetch(session)
                if groups is None:
                    await asyncio.sleep(POLL_S)
                    continue
                await self._submit(number, groups)
                number += 1

    async def _last_submitted(self) -> int:
        """The newest batch of which something was submitted: it is fetched again, the part that is known is known."""
        newest, after = 0, -1
        while page := await self._ledger.outcomes(after=after, limit=PAGE):
            newest = max([newest, *(past.number // PLACES for past in page if past.task_id.startswith(TASK))])
            after = page[-1].sequence
        return newest

    async def _has_room(self) -> bool:
        """Wait until the trainer could use more. False: the run is over."""
        while True:
            status = await self._ledger.status()
            if status.ended:
                return False
            if status.by_state.get("queued", 0) < self._most_queued:
                return True
            await asyncio.sleep(POLL_S)

    async def _register(self, session: aiohttp.ClientSession, *, starting_step: int) -> None:
        body = {
            "wandb_group": "rollbook",
            "wandb_project": "rollbook",
            "batch_size": self._config.batch_sequences,
            "max_token_len": self._config.max_token_len,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": starting_step,
            "num_steps": self._num_steps or 2**31 - 1,
        }
        await self._ask(session, "POST", "/register", body)
        self._log.info("atropos.source_registered", url=self._url, starting_step=starting_step)

    async def _fetch(self, session: aiohttp.ClientSession) -> list[dict[str, Any]] | None:
        found = await self._ask(session, "GET", "/batch", None)
        groups = found.get("batch")
        if groups is not None and len(groups) > PLACES:
            raise RunError(f"{self._url}/batch gave {len(groups)} groups; lower tasks.atropos.batch_sequences")
        return groups

    async def _submit(self, number: int, groups: list[dict[str, Any]]) -> None:
        for place, posted in enumerate(groups):
            found = self._id_of(number, place, posted)
            try:
                group = decode_scored_data(msgspec.json.encode(posted), found)
            except RunError as error:
                # One environment's mistake; it stays readable in the run it was posted to.
                self._log.warning("atropos.group_refused", group=found, cause=str(error))
                continue
            receipt = await self._ledger.submit(encode_group(group), group.outcome(seconds=0.0), attempt=1)
            self._log.debug("atropos.group_taken_over", group=found, receipt=receipt)

    def _id_of(self, number: int, place: int, posted: dict[str, Any]) -> GroupId:
        env = posted.get("env_id")
        return group_id(TaskId(TASK if env is None else f"{TASK}.env{env}"), number * PLACES + place)

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        deadline = Deadline(REQUEST_S, f"Atropos {method} {path}")

        async def attempt() -> dict[str, Any]:
            try:
                async with session.request(
                    method, f"{self._url}{path}", json=body, timeout=aiohttp.ClientTimeout(total=deadline.remaining_s())
                ) as response:
                    if response.status >= 500:
                        raise TransientError(f"{self._url}{path} answered {response.status}: {await response.text()}")
                    if response.status != 200:
                        raise RunError(f"{self._url}{path} refused ({response.status}): {await response.text()}")
                    found = await response.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise TransientError(f"{self._url}{path}: {type(error).__name__}: {error}") from error
            if not isinstance(found, dict):
                raise RunError(f"{self._url}{path} answered {found!r}; is it an Atropos server?")
            return found

        return await retry(attempt, on=TransientError, deadline=deadline)
