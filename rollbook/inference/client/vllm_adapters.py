"""vLLM with adapters: each publication is a name of its own, requests ask for the newest one, old ones are unloaded when idle.

A request keeps the adapter that it named to its end, so all its tokens carry that one publication. The servers need `--enable-lora`
and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollbook.contracts.adapter import adapter_name, named_publication
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Completion, Publication, PublicationId
from rollbook.inference.client.server_protocol import Question, Sighting
from rollbook.inference.client.vllm import RETRY_STALE_S, UNKNOWN, VllmDialect, VllmServerApi
from rollbook.inference.connection import NotThereError, PolicyConnection, ReplicaBusyError
from rollbook.inference.wire.completions import VersionSpan
from rollbook.inference.wire.generate import GenerateChoice
from rollbook.inference.wire.weights import UpdateInfo

FRESH_S = 0.25
"""How long what a server listed is taken as its newest name. A request that needs a newer one looks at once."""
KEPT = 2
"""The newest names stay, used or not: who has just heard of one may be about to ask for it."""


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


@dataclass(slots=True)
class _Seen:
    publication: int
    at: float


class VllmAdapterDialect(VllmDialect):
    """Asks for the newest adapter that the server has."""

    def __init__(self, *, model_name: str) -> None:
        super().__init__(model_name=model_name)
        self._models = msgspec.json.Decoder(_Models)
        self._seen: dict[str, _Seen] = {}
        self._looking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _ask(self, connection: PolicyConnection, question: Question) -> Completion:
        publication = await self._newest(connection, question.min_publication)
        try:
            return await self._answer(connection, question, model=adapter_name(PublicationId(publication)))
        except NotThereError as error:
            # Unloaded since we looked: there is a newer one.
            self._seen.pop(connection.url, None)
            raise ReplicaBusyError(str(error), retry_after_s=RETRY_STALE_S) from error

    def _stamp(self, choice: GenerateChoice, model: str) -> None:
        """vLLM tells the version of its base. What sampled these tokens is the adapter that was named."""
        number = named_publication(model)
        choice.weight_versions = (
            [VersionSpan(version=UNKNOWN if number is None else number, start=0, end=len(choice.token_ids))]
            if choice.token_ids
            else []
        )

    async def look(self, connection: PolicyConnection) -> Sighting:
        seen = await super().look(connection)
        return Sighting(publication=await self._listed(connection), load=seen.load)

    async def _newest(self, connection: PolicyConnection, at_least: int) -> int:
        async with self._looking[connection.url]:
            seen = self._seen.get(connection.url)
            now = asyncio.get_running_loop().time()
            if seen is None or seen.publication < at_least or now - seen.at > FRESH_S:
                seen = self._seen[connection.url] = _Seen(await self._listed(connection), now)
        if seen.publication == UNKNOWN or seen.publication < at_least:
            raise ReplicaBusyError(
                f"{connection.url} has adapter {seen.publication} (-1: none), and {at_least} or newer was asked for",
                retry_after_s=RETRY_STALE_S,
            )
        return seen.publication

    async def _listed(self, connection: PolicyConnection) -> int:
        return max(await _loaded(connection, self._models), default=UNKNOWN)


class VllmAdapterServerApi(VllmServerApi):
    """Loads every publication under its own name. Nothing is paused: who runs goes on with the adapter it began with."""

    def __init__(self) -> None:
        super().__init__("reload")
        self._models = msgspec.json.Decoder(_Models)

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        if info.adapter is None or info.path is None:
            raise ValueError("adapter: whole weights cannot be loaded as one; set inference.publish = 'full'")
        loaded = await _loaded(replica, self._models)
        if info.publication not in loaded:
            body = {"lora_name": info.adapter.name, "lora_path": str(Path(info.path).parent)}
            await replica.post_text("/v1/load_lora_adapter", msgspec.json.encode(body))
        await self._post(replica, "/update_weight_version", new_version=str(info.publication))
        await self._unload_idle(replica, {*loaded, info.publication})

    async def require(self, replica: PolicyConnection, publication: Publication, *, dtype: str | None) -> None:
        await super().require(replica, publication, dtype=dtype)
        if publication.id not in await _loaded(replica, self._models):
            raise TransientError(f"{replica.url} does not list {adapter_name(publication.id)}; it is loaded again")

    async def _unload_idle(self, replica: PolicyConnection, loaded: Collection[int]) -> None:
        old = sorted(loaded)[:-KEPT]
        if not old:
            return
        used = names_in_use(await replica.get_text("/metrics"))
        for number in old:
            name = adapter_name(PublicationId(number))
            if name not in used:
                await replica.post_text("/v1/unload_lora_adapter", msgspec.json.encode({"lora_name": name}))


async def _loaded(connection: PolicyConnection, decoder: "msgspec.json.Decoder[_Models]") -> set[int]:
    """Publications whose adapters the server lists."""
    listed = await connection.get("/v1/models", decoder)
    numbers = (named_publication(card.id) for card in listed.data)
    return {number for number in numbers if number is not None}


def names_in_use(metrics: str) -> set[str]:
    """Adapters of requests that run or wait, from vLLM's figures: each line has the time it was true, and the newest counts."""
    rows: list[tuple[float, Sequence[str]]] = []
    pattern = r'^vllm:lora_requests_info\{.*running_lora_adapters="([^"]*)".*waiting_lora_adapters="([^"]*)".*\} (\S+)$'
    for running, waiting, at in re.findall(pattern, metrics, flags=re.MULTILINE):
        rows.append((float(at), [*running.split(","), *waiting.split(",")]))
    return {name for name in max(rows, default=(0.0, []))[1] if name}
