"""`rollbook host`: a run without its trainer, for an external trainer.

Ledger, policy server, environments and dispatcher run supervised, as in `rollbook train`. Once all are ready, `host.json` in the
run directory holds their addresses and the settings that a trainer needs.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rich.console import Console

from rollbook.commands.arguments import Argument, Option, Overrides
from rollbook.commands.output import EXIT_FAILED, print_error, stderr_console
from rollbook.commands.training.train import resolve_run, write_or_check_config
from rollbook.concurrency.child_process.child import die_with_parent
from rollbook.contracts.errors import RunError, TransientError
from rollbook.run.config.run import ConfigError, LoadedConfig, RunConfig, load_resolved_config, name_of
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.ledger_clients import ledger_token_file, open_run_ledger
from rollbook.run.policy_clients import policy_urls
from rollbook.run.resources.automatic import resolve
from rollbook.run.resources.machine import this_machine
from rollbook.run.supervision.supervisor import RunOutcome, Supervisor, require_posix
from rollbook.telemetry.events import EventLog
from rollbook.trainer.config import TrainerConfig

HOST_FILE = "host.json"
USED_TRAINER_SETTINGS = ("max_steps", "seed")
FINISH_POLL_S = 0.2
"""Interval between checks whether the trainer has ended the run."""


def host(
    source: Path, *, run_dir: Path | None, overrides: Sequence[str], parent_fd: int | None, console: Console
) -> RunOutcome:
    """Run until the trainer ends the run, or until a signal. With `parent_fd`, at the latest until that pipe closes."""
    require_posix()
    if parent_fd is not None:
        die_with_parent(parent_fd)
    loaded, directory = resolve_run(source, run_dir, overrides)
    _reject_vllm(loaded.config)
    _reject_trainer_settings(loaded.config)
    loaded = _for_this_machine(loaded, directory, console)
    directory.prepare()
    with directory.locked():
        host_file = directory.path / HOST_FILE
        host_file.unlink(missing_ok=True)
        is_resumed = write_or_check_config(loaded, directory, console)
        log = EventLog("supervisor", directory.log_file("supervisor"))
        log.info("host.started", resumed=is_resumed)

        async def until_finished(addresses: Mapping[str, str]) -> None:
            await _until_finished(addresses["ledger"], loaded, directory, log)

        supervisor = Supervisor(
            loaded.config,
            directory,
            log=log,
            say=lambda text: console.print(text, markup=False, soft_wrap=True),
            has_trainer=False,
            until_over=until_finished,
        )
        try:
            outcome = asyncio.run(_run(supervisor, loaded, directory, console))
        finally:
            host_file.unlink(missing_ok=True)
        log.info("host.ended", how=outcome.end, message=outcome.message)
        return outcome


def _for_this_machine(loaded: LoadedConfig, directory: RunDirectory, console: Console) -> LoadedConfig:
    """Choose the open settings of policy servers and workers. The memory of the external trainer is unknown."""
    recorded = load_resolved_config(directory).config if directory.exists else None
    found = resolve(loaded, this_machine(), recorded=recorded, has_trainer=False)
    if faults := found.faults():
        raise ConfigError(name_of(loaded.file), faults)
    inference = found.loaded.config.inference
    for line in (f"policy: {inference.device}, {inference.dtype}", *found.notes):
        console.print(line, markup=False, soft_wrap=True)
    return found.loaded


async def _until_finished(ledger_url: str, loaded: LoadedConfig, directory: RunDirectory, log: EventLog) -> None:
    """Wait for the end of the run in the ledger: the dispatcher ends earlier, while the trainer still trains the last steps."""
    async with open_run_ledger(loaded, directory, ledger_url, log=log) as ledger:
        while True:
            with suppress(TransientError):
                if (await ledger.status()).ended:
                    return
            await asyncio.sleep(FINISH_POLL_S)


def _reject_vllm(config: RunConfig) -> None:
    if config.inference.engine == "vllm":
        raise RunError(
            "inference.engine is vllm, but an external trainer publishes weights to rollbook's own policy servers only. Use "
            'inference.engine = "transformers", or train with `rollbook train`, which updates vLLM servers'
        )


def _reject_trainer_settings(config: RunConfig) -> None:
    """The external trainer has its own settings; only the length of the run is read from `[trainer]`."""
    given, defaults = config.trainer.model_dump(), TrainerConfig().model_dump()
    unread = sorted(name for name in given if name not in USED_TRAINER_SETTINGS and given[name] != defaults[name])
    if unread:
        raise RunError(
            f"not read by `rollbook host`: trainer.{', trainer.'.join(unread)}. Set it in the external trainer and remove it here"
        )


async def _run(supervisor: Supervisor, loaded: LoadedConfig, directory: RunDirectory, console: Console) -> RunOutcome:
    async def report_when_ready() -> None:
        for process in supervisor.processes:
            await process.ready.wait()
        write_json(directory.path / HOST_FILE, host_info(supervisor.addresses, loaded, directory))
        console.print(f"ready for a trainer: {directory.path / HOST_FILE}", markup=False, soft_wrap=True)

    reporting = asyncio.create_task(report_when_ready(), name="host.report_ready")
    try:
        return await supervisor.run()
    finally:
        reporting.cancel()


def host_info(addresses: dict[str, str], loaded: LoadedConfig, directory: RunDirectory) -> dict[str, object]:
    """What an external trainer needs to know."""
    config = loaded.config
    ledger_token = ledger_token_file(loaded, directory)
    return {
        "pid": os.getpid(),
        "ledger_url": addresses["ledger"],
        "policy_urls": policy_urls(addresses["policy"]),
        "token_file": str(directory.token_file),
        "ledger_token_file": None if ledger_token is None else str(ledger_token),
        "run": config.run.name,
        "model_dir": str(directory.initial_model),
        "groups_per_step": config.gate.groups_per_step,
        "completions_per_prompt": config.rollout.completions_per_prompt,
        "batch_policy": str(config.gate.batch_policy),
        "max_head_offpolicy_versions": config.gate.max_head_offpolicy_versions,
        "max_steps": config.trainer.max_steps,
        "temperature": config.rollout.sampling.temperature,
        "request_s": config.ledger.request_s,
    }


def host_command(
    config: Annotated[Path, Argument(help="The run's TOML file, or a run directory to resume.")],
    run_dir: Annotated[Path | None, Option("--run-dir", help="The run directory; an existing one is resumed.")] = None,
    override: Overrides = None,
    parent_fd: Annotated[int | None, Option("--parent-fd", is_hidden=True)] = None,
) -> int:
    """Run ledger, policy server, environments and rollout workers for an external trainer, such as TRL."""
    outcome = host(config, run_dir=run_dir, overrides=override or (), parent_fd=parent_fd, console=stderr_console())
    if outcome.end == "failed":
        print_error(outcome.message)
        return EXIT_FAILED
    return 0
