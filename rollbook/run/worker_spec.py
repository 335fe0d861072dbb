"""The specification of a run's rollout workers, for training and for evaluation."""

from typing import Any

from rollbook.access.guard import is_loopback
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.run.ledger_clients import ledger_token_file
from rollbook.run.supervision.child_main import RoleContext


def worker_spec(context: RoleContext) -> WorkerSpec:
    """What the worker processes of this run are built from."""
    config = context.loaded.config
    return WorkerSpec(
        builder="rollbook.run.processes.rollout_worker:build_setup",
        config=config.rollout,
        settings={
            "policy_url": context.addresses["policy"],
            "model_dir": str(context.directory.initial_model),
            "inference": config.inference.model_dump(mode="json"),
            "env": _envs(context),
            "rollout": config.rollout.model_dump(mode="json"),
            "log_file": str(context.directory.log_file(f"{context.name}-worker")),
            **_access(context),
        },
        search_path=tuple(map(str, context.loaded.search_path)),
        failures=str(context.directory.failures),
    )


def _access(context: RoleContext) -> dict[str, Any]:
    """Where workers find the lists of servers, if these may change, and the files with the tokens that they need."""
    config, directory = context.loaded.config, context.directory
    is_local = is_loopback(config.cluster.host)
    file = None if is_local else str(directory.client_token_file)
    found: dict[str, Any] = {"policy_token_file": file, "env_token_file": file if "env" in context.addresses else None}
    if config.cluster.has_members and "ledger" in context.addresses:
        ledger_file = ledger_token_file(context.loaded) if config.ledger.url is not None else None
        if config.ledger.url is None and not is_local:
            ledger_file = directory.client_token_file
        found["members"] = {
            "ledger_url": context.addresses["ledger"],
            "run": config.run.name,
            "token_file": None if ledger_file is None else str(ledger_file),
            "env_url": context.addresses.get("env"),
        }
    return found


def _envs(context: RoleContext) -> dict[str, Any]:
    """The workers' environments: on the run's environment server, on an external one, or inside the workers."""
    if "env" in context.addresses:
        return {"url": context.addresses["env"]}
    return context.loaded.config.env.model_dump(mode="json", exclude_unset=True)
