"""The specification of a run's rollout workers, for training and for evaluation."""

from typing import Any

from rollbook.rollout.workers.spec import WorkerSpec
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
            "log_file": str(context.directory.log_file("rollout-worker")),
        },
        search_path=tuple(map(str, context.loaded.search_path)),
        failures=str(context.directory.failures),
    )


def _envs(context: RoleContext) -> dict[str, Any]:
    """The workers' environments: on the run's environment server, on an external one, or inside the workers."""
    if "env" in context.addresses:
        return {"url": context.addresses["env"]}
    return context.loaded.config.env.model_dump(mode="json", exclude_unset=True)
