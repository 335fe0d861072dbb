"""The rollout workers of a run: their specification, and the parts that a worker builds from it.

A worker has a policy client, a tokenizer and environments. The specification has plain values only: it is sent to the process.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import read_token
from rollbook.contracts.admission import MemberRole
from rollbook.envs.client.remote import ServerSource
from rollbook.envs.config import EnvConfig
from rollbook.inference.client.fleet import ReplicaSource
from rollbook.inference.config import InferenceConfig
from rollbook.ledger.client.client import open_ledger_client
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import RolloutSetup
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.run.episodes import open_setup
from rollbook.run.ledger_clients import ledger_token_file, member_source
from rollbook.run.policy_clients import open_policy, policy_urls
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.events import EventLog

MEMBERS_S = 5.0
"""How long a request for the list of members is repeated. Until then the last list is used."""


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
        judgements=str(context.directory.judgements_file),
        teacher_scores=str(context.directory.teacher_scores_file),
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


@asynccontextmanager
async def build_setup(settings: Mapping[str, Any]) -> AsyncIterator[RolloutSetup]:
    inference = InferenceConfig.model_validate(settings["inference"])
    rollout = RolloutConfig.model_validate(settings["rollout"])
    tokenizer = ModelTokenizer.from_directory(Path(settings["model_dir"]))
    log = EventLog("rollout-worker", Path(settings["log_file"]))
    sampling = rollout.sampling.params(tokenizer.eos_token_ids)
    if settings.get("is_greedy"):
        # For evaluation only; training always samples.
        sampling = msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    try:
        async with (
            _members(settings, log) as (policies, env_servers),
            open_policy(
                inference,
                settings["policy_url"],
                log=log,
                token=_token(settings.get("policy_token_file")),
                source=policies,
            ) as policy,
            open_setup(
                policy,
                tokenizer=tokenizer,
                sampling=sampling,
                rollout=rollout,
                env=_env(settings),
                log=log,
                request_s=inference.request_s,
                policy_url=policy_urls(settings["policy_url"])[0],
                policy_token=_token(settings.get("policy_token_file")),
                env_servers=env_servers,
            ) as setup,
        ):
            yield setup
    finally:
        log.close()


def _env(settings: Mapping[str, Any]) -> EnvConfig:
    env, token = EnvConfig.model_validate(settings["env"]), _token(settings.get("env_token_file"))
    return env if token is None else env.model_copy(update={"token": SecretStr(token)})


@asynccontextmanager
async def _members(
    settings: Mapping[str, Any], log: EventLog
) -> AsyncIterator[tuple[ReplicaSource | None, ServerSource | None]]:
    """Lists the policy servers and the environment servers, where processes may join the run."""
    members = settings.get("members")
    if members is None:
        yield None, None
        return
    async with open_ledger_client(
        members["ledger_url"], members["run"], request_s=MEMBERS_S, log=log, token=_token(members["token_file"])
    ) as ledger:
        policies = member_source(ledger, MemberRole.POLICY, policy_urls(settings["policy_url"]))
        own_env = members["env_url"]
        yield policies, None if own_env is None else member_source(ledger, MemberRole.ENV, [own_env])


def _token(file: str | None) -> str | None:
    return None if file is None else read_token(Path(file))
