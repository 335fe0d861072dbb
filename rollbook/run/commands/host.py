"""`rollbook host`: everything of a run but its trainer, for trainers of other people.

Ledger, policy server, worlds and dispatcher run and are watched as in `rollbook train`. Where they are, and what a trainer must
know of the run, stands in `host.json` of the run directory as soon as all of them are ready.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from rollbook.concurrency.child_process.child import die_with_parent
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.client.client import open_ledger_client
from rollbook.run.commands.train import claim, settle
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.model_location import model_location
from rollbook.run.policy_clients import policy_urls
from rollbook.run.supervision.supervisor import RunOutcome, Supervisor, require_posix
from rollbook.telemetry.events import EventLog
from rollbook.trainer.config import TrainerConfig

HOST_FILE = "host.json"
READ = ("max_steps", "seed")
FINISH_POLL_S = 0.2
"""Between looks at whether the trainer has ended the run."""


def host(
    source: Path, *, run_dir: Path | None, overrides: Sequence[str], parent_fd: int | None, console: Console
) -> RunOutcome:
    """Run until the trainer ends the run, or until told to stop. With `parent_fd`, also until that pipe closes."""
    require_posix()
    if parent_fd is not None:
        die_with_parent(parent_fd)
    loaded, directory = settle(source, run_dir, overrides)
    _refuse_unread(loaded.config)
    directory.prepare()
    with directory.locked():
        told = directory.path / HOST_FILE
        told.unlink(missing_ok=True)
        is_resumed = claim(loaded, directory, console)
        log = EventLog("supervisor", directory.log_file("supervisor"))
        log.info("host.started", resumed=is_resumed)

        async def until_finished(addresses: Mapping[str, str]) -> None:
            await _until_finished(addresses["ledger"], loaded.config, log)

        supervisor = Supervisor(loaded.config, directory, log=log, has_trainer=False, until_over=until_finished)
        try:
            outcome = asyncio.run(_hosted(supervisor, loaded.config, directory, console))
        finally:
            told.unlink(missing_ok=True)
        log.info("host.ended", how=outcome.end, message=outcome.message)
        return outcome


async def _until_finished(ledger_url: str, config: RunConfig, log: EventLog) -> None:
    """The dispatcher ends when no further group is needed; the trainer then still learns, publishes and saves the last steps."""
    run = RunId(config.run.name)
    async with open_ledger_client(ledger_url, run, request_s=config.ledger.request_s, log=log) as ledger:
        while True:
            with suppress(TransientError):
                if (await ledger.status()).ended:
                    return
            await asyncio.sleep(FINISH_POLL_S)


def _refuse_unread(config: RunConfig) -> None:
    """Somebody else trains: of our trainer's settings only the length of the run means something."""
    given, plain = config.trainer.model_dump(), TrainerConfig().model_dump()
    unread = sorted(name for name in given if name not in READ and given[name] != plain[name])
    if unread:
        raise RunError(
            f"trainer.{', trainer.'.join(unread)}: not read by `rollbook host`, where the trainer is not ours; set it there and "
            "remove it here"
        )


async def _hosted(supervisor: Supervisor, config: RunConfig, directory: RunDirectory, console: Console) -> RunOutcome:
    async def tell_when_ready() -> None:
        for process in supervisor.processes:
            await process.ready.wait()
        write_json(directory.path / HOST_FILE, host_info(supervisor.addresses, config, directory))
        console.print(f"ready for a trainer: {directory.path / HOST_FILE}", soft_wrap=True)

    telling = asyncio.create_task(tell_when_ready(), name="host.tell")
    try:
        return await supervisor.run()
    finally:
        telling.cancel()


def host_info(addresses: dict[str, str], config: RunConfig, directory: RunDirectory) -> dict[str, object]:
    """What a trainer of other people needs to know."""
    return {
        "pid": os.getpid(),
        "ledger_url": addresses["ledger"],
        "policy_urls": policy_urls(addresses["policy"]),
        "run": config.run.name,
        "model_dir": str(model_location(directory)),
        "groups_per_step": config.gate.groups_per_step,
        "completions_per_prompt": config.rollout.completions_per_prompt,
        "max_head_offpolicy_versions": config.gate.max_head_offpolicy_versions,
        "max_steps": config.trainer.max_steps,
        "temperature": config.rollout.sampling.temperature,
        "request_s": config.ledger.request_s,
    }
