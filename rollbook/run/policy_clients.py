"""Clients of the policy servers: for completions (rollout workers) and for weights (the trainer)."""

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import read_token
from rollbook.contracts.errors import RunError
from rollbook.inference.client.client import PolicyClient, open_policy_client
from rollbook.inference.client.fleet import ReplicaSource
from rollbook.inference.client.server_protocol import RollbookProtocol, ServerProtocol
from rollbook.inference.config import InferenceConfig
from rollbook.inference.sglang.client import SglangProtocol, SglangServerApi
from rollbook.inference.vllm.adapters import VllmAdapterProtocol, VllmAdapterServerApi
from rollbook.inference.vllm.client import VllmProtocol, VllmServerApi
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.server_api import RollbookServerApi, WeightServerApi
from rollbook.inference.weights.shared_memory import has_shared_memory
from rollbook.inference.weights.transport import TransportOptions, WeightTransport, open_transport
from rollbook.rollout.policy import current_episode
from rollbook.run.config.run import RunConfig
from rollbook.telemetry.events import EventLog

FIRST_GPU = ("cuda", "cuda:0")
"""The device of the trainer's first rank, which publishes."""


ABSENT_S = 60.0
"""How long nothing may listen at one of `inference.urls` when the run starts."""


def join_urls(urls: Sequence[str]) -> str:
    """The URLs of all replicas as one address."""
    return ",".join(urls)


def policy_urls(address: str) -> list[str]:
    return address.split(",")


def open_policy(
    config: InferenceConfig,
    address: str,
    *,
    log: EventLog | None,
    token: str | None = None,
    source: ReplicaSource | None = None,
) -> AbstractAsyncContextManager[PolicyClient]:
    """A client of the policy at `address`, one or several replicas. The turns of an episode go to the same replica.

    `token`: of the run's own servers, if they need one. `source`: lists the replicas, where the list may change.
    """
    return open_policy_client(
        policy_urls(address),
        request_s=config.request_s,
        log=log,
        max_connections=config.max_connections,
        protocol=_protocol(config),
        session=episode_session,
        api_key=api_key(config) or token,
        source=source,
        watch_s=config.watch_s,
        spread=config.affinity_spread,
    )


def episode_session() -> str | None:
    """An id of the current episode, for session affinity."""
    episode = current_episode()
    return None if episode is None else f"{episode.group_id}/{id(episode)}"


def open_weights(
    config: InferenceConfig,
    address: str,
    *,
    directory: Path,
    trainer_device: str,
    shares_gpu: bool,
    token: str | None,
    log: EventLog | None,
    source: ReplicaSource | None = None,
) -> WeightTransferClient:
    """The publishing side, with the configured transport. `directory`: for weight files. `token`: of the servers.

    `shares_gpu`: the trainer and the policy may be on one GPU.
    """
    return WeightTransferClient(
        policy_urls(address),
        request_s=config.request_s,
        confirm_s=config.confirm_s if len(policy_urls(address)) > 1 or source is not None else None,
        transport=_transport(config, directory, trainer_device, shares_gpu=shares_gpu, token=token),
        server_api=_server_api(config),
        sequence=config.update_sequence,
        check_digest=config.check_digest,
        api_key=token,
        log=log,
        source=source,
        # The run's own servers may take minutes to start; the supervisor watches them.
        absent_s=ABSENT_S if config.urls else None,
    )


def api_key(config: InferenceConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise RunError(f"inference.api_key_env: the variable {config.api_key_env} is not set")
    return key


def steering_token(config: InferenceConfig, *, own: str, source_dir: Path) -> str | None:
    """The token with which weights are pushed: that of the run for its own servers, and the configured one for `urls`."""
    if not config.urls:
        return own
    return api_key(config) if config.token_file is None else read_token(source_dir / config.token_file.expanduser())


def reachable(config: RunConfig) -> InferenceConfig:
    """Policy servers on other machines fetch weights over the network."""
    inference = config.inference
    changes: dict[str, str] = {}
    if inference.transfer_host is None:
        changes["transfer_host"] = config.cluster.host
    if inference.transfer == "auto" and config.cluster.has_members and not is_loopback(config.cluster.host):
        changes["transfer"] = "pull"
    return inference.model_copy(update=changes)


def chosen_transfer(config: InferenceConfig, trainer_device: str, *, shares_gpu: bool = True) -> str:
    """Resolves `auto`: memory shared with the run's own replicas, of the GPU or else of the host."""
    if config.transfer != "auto":
        return config.transfer
    if config.urls:
        return "directory"
    if shares_gpu and config.engine == "transformers" and trainer_device == "cuda" and config.device in FIRST_GPU:
        return "cuda_ipc"
    return "shared_memory" if has_shared_memory() else "directory"


def _transport(
    config: InferenceConfig, directory: Path, trainer_device: str, *, shares_gpu: bool, token: str | None
) -> WeightTransport:
    options = TransportOptions(directory=str(directory), host=config.transfer_host or "127.0.0.1", token=token)
    return open_transport(chosen_transfer(config, trainer_device, shares_gpu=shares_gpu), options)


def _protocol(config: InferenceConfig) -> ServerProtocol:
    if config.engine == "sglang":
        return SglangProtocol()
    if config.engine != "vllm":
        return RollbookProtocol()
    kind = VllmAdapterProtocol if config.publish == "adapter" else VllmProtocol
    return kind(model_name=config.vllm.model_name)


def _server_api(config: InferenceConfig) -> WeightServerApi:
    if config.engine == "sglang":
        return SglangServerApi()
    if config.engine != "vllm":
        return RollbookServerApi()
    if config.publish == "adapter":
        return VllmAdapterServerApi()
    return VllmServerApi("nccl" if config.transfer == "nccl" else config.vllm.update)
