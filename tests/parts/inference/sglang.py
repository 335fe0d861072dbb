"""A server with the wire format of SGLang in front of our embedded engine, for machines on which SGLang does not run.

Bodies are read by the classes below, which have the fields of SGLang's own; `test_inference_sglang.py` compares them with the
source of the package, and others are refused. What SGLang's scheduler does with a request is not tested by it.
"""

import ast
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from aiohttp import web

from rollbook.access.server import serve_app
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import EpisodeError, TransientError
from rollbook.contracts.policy import Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import weights_digest
from rollbook.inference.engine import Engine
from rollbook.inference.pause import PauseMode
from rollbook.inference.weights.safetensors import read_weights
from rollbook.inference.wire.weights import UNPUBLISHED

SOURCE = Path(__file__).parents[3] / ".venvs" / "sglang" / "sglang" / "srt"


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Other fields are refused."""


class SamplingBody(Strict):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    ignore_eos: bool
    no_stop_trim: bool
    skip_special_tokens: bool
    sampling_seed: int | None = None


class GenerateBody(Strict):
    input_ids: list[int]
    sampling_params: SamplingBody
    return_logprob: bool
    logprob_start_len: int


class PauseBody(Strict):
    mode: Literal["abort", "retract", "in_place"]


class ContinueBody(Strict):
    torch_empty_cache: bool = True


class UpdateBody(Strict):
    model_path: str
    weight_version: str
    abort_all_requests: bool
    flush_cache: bool


class VersionBody(Strict):
    new_version: str
    abort_all_requests: bool


PUBLISHED: dict[type[Strict], tuple[str, str]] = {
    SamplingBody: ("sampling/sampling_params.py", "SamplingParams"),
    GenerateBody: ("managers/io_struct.py", "GenerateReqInput"),
    PauseBody: ("managers/io_struct.py", "PauseGenerationReqInput"),
    ContinueBody: ("managers/io_struct.py", "ContinueGenerationReqInput"),
    UpdateBody: ("managers/io_struct.py", "UpdateWeightFromDiskReqInput"),
    VersionBody: ("managers/io_struct.py", "UpdateWeightVersionReqInput"),
}
"""File and name of SGLang's own class."""


def published_fields(file: str, name: str) -> dict[str, str]:
    """The fields of a class of SGLang with their types, read from its source."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    fields = (node for node in found.body if isinstance(node, ast.AnnAssign))
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}


class StandIn:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_published = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/update_weight_version", self._set_version)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        return app

    @property
    def _version(self) -> str:
        publication = self._engine.publication
        return str(publication.id) if publication is not None and self._is_published else UNPUBLISHED

    async def _generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=GenerateBody)
        asked = body.sampling_params
        sampling = SamplingParams(
            max_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=0 if asked.top_k == -1 else asked.top_k,
            stop_token_ids=tuple(asked.stop_token_ids),
            seed=asked.sampling_seed,
        )
        try:
            completion = await self._engine.submit(body.input_ids, sampling)
        except EpisodeError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except TransientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)
        tokens, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        edges = [0, *(np.flatnonzero(np.diff(completion.versions)) + 1).tolist(), len(tokens)]
        spans = [
            {"version": str(completion.versions[start]), "start": start, "end": end}
            for start, end in itertools.pairwise(edges)
        ]
        meta = {
            "id": "0",
            "finish_reason": {"type": str(completion.finish_reason)},
            "prompt_tokens": len(body.input_ids),
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [[score, token, None] for score, token in zip(logprobs, tokens, strict=True)],
        }
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})

    async def _pause(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=PauseBody)
        await self._engine.pause(PauseMode.ABORT if body.mode == "abort" else PauseMode.KEEP)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        msgspec.json.decode(await request.read(), type=ContinueBody)
        await self._engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=UpdateBody)
        try:
            (file,) = Path(body.model_path).glob("*.safetensors")
        except ValueError:
            return _updated(False, f"no weights in {body.model_path}", 400)
        digest = weights_digest(read_weights(file).values())
        number = int(body.weight_version)
        await self._engine.load_weights(
            Publication(id=PublicationId(number), epoch=1, step=number, digest=digest), file
        )
        self._is_published = True
        return _updated(True, "Succeeded to update model weights.", 200)

    async def _set_version(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=VersionBody)
        self._is_published = body.new_version != UNPUBLISHED
        return web.json_response({"success": True, "message": "", "new_version": body.new_version})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "", "weight_version": self._version})

    async def _loads(self, _: web.Request) -> web.Response:
        stats = self._engine.stats()
        load = {"dp_rank": 0, "num_running_reqs": stats.running, "num_waiting_reqs": stats.queued}
        return web.json_response({"timestamp": "", "version": "", "loads": [load]})


def _updated(success: bool, message: str, status: int) -> web.Response:
    content: dict[str, Any] = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(content, status=status)


@asynccontextmanager
async def serve_stand_in(engine: Engine) -> AsyncIterator[str]:
    async with serve_app(StandIn(engine).app(), listening_socket("127.0.0.1", 0), drain_s=1.0) as url:
        yield url
