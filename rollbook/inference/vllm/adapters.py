"""vLLM with LoRA adapters: each publication has its own adapter name, requests use the newest one, idle old ones are unloaded.

A request keeps its adapter to the end, so all its tokens have the same publication. The servers need `--enable-lora` and
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
"""

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import EpisodeError, NotFoundError, TransientError
from rollbook.contracts.policy import Completion, Publication, PublicationId
from rollbook.contracts.weights import adapter_name, named_publication
from rollbook.inference.client.server_protocol import CompletionRequest, ReplicaStatus
from rollbook.inference.connection import PolicyConnection, ReplicaBusyError
from rollbook.inference.vllm.client import RETRY_AFTER_S, UNKNOWN, VllmProtocol, VllmServerApi
from rollbook.inference.wire.completions import VersionSpan
from rollbook.inference.wire.generate import GenerateChoice
from rollbook.inference.wire.weights import UpdateInfo

NEWEST_VALID_S = 0.25
"""How long the newest listed adapter of a server is remembered. A request that requires a newer one lists them at once."""
KEPT_ADAPTERS = 2
"""The newest adapters stay loaded, because a client that has just listed one may be about to use it."""


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


_MODELS = json_decoder(_Models)


class VllmAdapterProtocol(VllmProtocol):
    """Requests completions of the newest adapter that the server lists."""

    def __init__(self, *, model_name: str) -> None:
        super().__init__(model_name=model_name)
        self._newest: dict[str, tuple[int, float]] = {}
        """By URL: the newest publication, and when it was listed."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def complete(self, connection: PolicyConnection, request: CompletionRequest) -> Completion:
        publication = await self._newest_publication(connection, request.min_publication)
        try:
            return await self.generate(connection, request, model=adapter_name(PublicationId(publication)))
        except NotFoundError as error:
            # It was unloaded since it was listed: there is a newer one.
            self._newest.pop(connection.url, None)
            raise ReplicaBusyError(str(error), retry_after_s=RETRY_AFTER_S) from error

    def set_versions(self, choice: GenerateChoice, model: str) -> None:
        """vLLM reports the version of its base model. The tokens were sampled from the named adapter."""
        number = named_publication(model)
        span = VersionSpan(version=UNKNOWN if number is None else number, start=0, end=len(choice.token_ids))
        choice.weight_versions = [span] if choice.token_ids else []

    async def status(self, connection: PolicyConnection) -> ReplicaStatus:
        status = await super().status(connection)
        return ReplicaStatus(publication=max(await _loaded(connection), default=UNKNOWN), load=status.load)

    async def _newest_publication(self, connection: PolicyConnection, min_publication: int) -> int:
        async with self._locks[connection.url]:
            now = asyncio.get_running_loop().time()
            newest, listed_at = self._newest.get(connection.url, (UNKNOWN, now))
            if newest == UNKNOWN or newest < min_publication or now - listed_at > NEWEST_VALID_S:
                newest = max(await _loaded(connection), default=UNKNOWN)
                self._newest[connection.url] = newest, now
        if newest == UNKNOWN or newest < min_publication:
            raise ReplicaBusyError(
                f"{connection.url} has adapter {newest} (-1: none), required is {min_publication} or newer",
                retry_after_s=RETRY_AFTER_S,
            )
        return newest


class VllmAdapterServerApi(VllmServerApi):
    """Loads each publication under its own name. Nothing is paused: running requests keep their adapter."""

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        if info.adapter is None or info.path is None:
            raise ValueError("adapter: whole weights cannot be loaded as one; set inference.publish = 'full'")
        loaded = await _loaded(replica)
        if info.publication not in loaded:
            try:
                await self.post(
                    replica, "/v1/load_lora_adapter", lora_name=info.adapter.name, lora_path=str(Path(info.path).parent)
                )
            except EpisodeError:
                # vLLM refuses a loaded name. An earlier attempt, whose response was not awaited, may have loaded it meanwhile.
                if info.publication not in await _loaded(replica):
                    raise
        await self.post(replica, "/update_weight_version", new_version=str(info.publication))
        await self._unload_idle(replica, {*loaded, info.publication})

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        await super().require(replica, publication, dtype=dtype)
        if publication.id not in await _loaded(replica):
            raise TransientError(f"{replica.url} does not list {adapter_name(publication.id)}; it is loaded again")

    async def _unload_idle(self, replica: PolicyConnection, loaded: Collection[int]) -> None:
        old = sorted(loaded)[:-KEPT_ADAPTERS]
        used = adapters_in_use(await replica.get_text("/metrics")) if old else set()
        for number in old:
            name = adapter_name(PublicationId(number))
            if name not in used:
                with contextlib.suppress(NotFoundError):  # an earlier attempt has unloaded it
                    await self.post(replica, "/v1/unload_lora_adapter", lora_name=name)


async def _loaded(connection: PolicyConnection) -> set[int]:
    """The publications whose adapters the server lists."""
    listed = await connection.get("/v1/models", _MODELS)
    numbers = (named_publication(card.id) for card in listed.data)
    return {number for number in numbers if number is not None}


def adapters_in_use(metrics: str) -> set[str]:
    """The adapters of running and waiting requests in vLLM's metrics. The value of each line is its time; the newest counts."""
    rows: list[tuple[float, Sequence[str]]] = []
    pattern = r'^vllm:lora_requests_info\{.*running_lora_adapters="([^"]*)".*waiting_lora_adapters="([^"]*)".*\} (\S+)$'
    for running, waiting, at in re.findall(pattern, metrics, flags=re.MULTILINE):
        rows.append((float(at), [*running.split(","), *waiting.split(",")]))
    return {name for name in max(rows, default=(0.0, []))[1] if name}
