"""LoRA adapters by name, in vLLM's shapes: load a PEFT directory beside the base, and take it off again.

For people and their scripts: a trainer publishes its adapters by /update_weights, with an epoch, and once it has done so nobody
else changes weights here. This engine has one adapter at a time; loading another takes the first one's place.
"""

import asyncio
from pathlib import Path

import msgspec
from aiohttp import web

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.weights import weights_digest
from rollbook.inference.server.routes.replies import error_response
from rollbook.inference.server.routes.weights import publication_by_hand, to_its_end
from rollbook.inference.server.service import PolicyService
from rollbook.inference.weights.lora import read_adapter
from rollbook.inference.wire.weights import LoadAdapterBody, UnloadAdapterBody

BAD_INPUT, NOT_FOUND = "InvalidUserInput", "NotFoundError"


class AdapterRoutes:
    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._engine = service.engine
        self._turn = asyncio.Lock()

    async def load(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=LoadAdapterBody)
        name = body.lora_name
        if not name or not body.lora_path:
            return error_response(400, BAD_INPUT, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._service.model_names:
            return error_response(400, BAD_INPUT, f"The lora adapter '{name}' conflicts with a served base model.")
        async with self._turn:
            if not body.load_inplace and self._live == name:
                return error_response(
                    400,
                    BAD_INPUT,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                )
            try:
                settings, tensors = await asyncio.to_thread(read_adapter, Path(body.lora_path))
            except FileNotFoundError:
                return error_response(
                    404, NOT_FOUND, f"Loading lora {name} failed: No adapter found for {body.lora_path}"
                )
            digest = await asyncio.to_thread(weights_digest, tensors.values())
            publication = publication_by_hand(self._engine, digest, what=f"load_lora_adapter {name}")
            adapter = Adapter(name=name, settings=settings)
            await to_its_end(self._engine.load_tensors(publication, tensors, adapter=adapter))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = msgspec.json.decode(await request.read(), type=UnloadAdapterBody).lora_name
        if not name:
            return error_response(400, BAD_INPUT, "'lora_name' needs to be provided to unload a LoRA adapter.")
        async with self._turn:
            if self._live != name:
                return error_response(404, NOT_FOUND, f"The lora adapter '{name}' cannot be found.")
            publication = publication_by_hand(
                self._engine, await self._engine.base_digest(), what=f"unload_lora_adapter {name}"
            )
            await to_its_end(self._engine.unload_adapter(publication))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    @property
    def _live(self) -> str | None:
        return None if self._engine.adapter is None else self._engine.adapter.name
