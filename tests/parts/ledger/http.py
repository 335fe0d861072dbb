"""Plain HTTP requests to a ledger, without our client."""

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.http import wire
from tests.parts.ledger.groups import RUN, group_of, outcome_of


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    json: Any = field(default=None)
    """The body as JSON, where it is."""


class Caller:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        content_type: str | None = wire.CONTENT_TYPE,
    ) -> Response:
        """`body` is sent as MessagePack, `raw` as it is. Paths are relative to the run unless they start with two slashes."""
        sent = {"Accept": "application/json", **(headers or {})}
        data = raw if raw is not None else (None if body is None else msgspec.msgpack.encode(body))
        if data is not None and content_type is not None:
            sent["Content-Type"] = content_type
        at = f"{self.url}{path[1:]}" if path.startswith("//") else f"{self.url}/v1/runs/{RUN}{path}"
        skip = ("Content-Type",) if content_type is None else ()
        async with self.session.request(method, at, data=data, headers=sent, skip_auto_headers=skip) as response:
            read = await response.read()
            is_json = response.content_type == "application/json"
            return Response(
                response.status, dict(response.headers), read, msgspec.json.decode(read) if is_json else None
            )


def group_body(task: str, **changes: Any) -> dict[str, Any]:
    """A valid group of a `submit` message, with some fields changed."""
    group = group_of(task, (-1,))
    good = encode_group(group, outcome=outcome_of(group))
    return {**msgspec.msgpack.decode(msgspec.msgpack.encode(good)), **changes}


def submission(task: str, **changes: Any) -> dict[str, Any]:
    """A valid `submit` message of one group, with some fields of the group changed."""
    return {"groups": [group_body(task, **changes)]}
