"""API calls made in the worker process for set-up checks and grading. The agent cannot observe them."""

import base64
import datetime
from typing import Any

import awscli  # type: ignore[import-untyped]  # noqa: F401 - first: it brings its own botocore under this name
from botocore.config import Config  # type: ignore[import-untyped]  # the package ships no types
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    HTTPClientError,
    ParamValidationError,
)
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.session import Session  # type: ignore[import-untyped]

# Grading reads only small files; the rest of a longer body is not read.
BODY_BYTES = 2**18


class Api:
    """Cached clients, one for each service and region."""

    def __init__(self, *, endpoint: str | None, loader: Any) -> None:
        self._endpoint = endpoint
        self._session = Session()
        self._session.register_component("data_loader", loader)
        self._clients: dict[tuple[str, str | None], Any] = {}

    def call_all(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers, in order: a result, an error code, or the reason why there is no answer."""
        return [self._call(**call) for call in calls]

    def client(self, service: str, region: str | None = None) -> Any:
        client = self._clients.get((service, region))
        if client is None:
            config = Config(retries={"max_attempts": 0}, connect_timeout=5, read_timeout=15)
            client = self._clients[service, region] = self._session.create_client(
                service, region_name=region, endpoint_url=self._endpoint, config=config
            )
        return client

    def _call(
        self, *, service: str, operation: str, params: dict[str, Any], region: str | None = None
    ) -> dict[str, Any]:
        try:
            return {"result": plain(getattr(self.client(service, region), operation)(**params))}
        except ClientError as error:
            return {"code": error.response["Error"].get("Code", ""), "message": str(error)}
        except (HTTPClientError, NoConnectionError) as error:
            return {"unreachable": str(error)}
        except (ParamValidationError, BotoCoreError, AttributeError, TypeError) as error:
            return {"invalid": f"{service}.{operation}: {type(error).__name__}: {error}"}


def plain(value: Any) -> Any:
    """An API response as JSON values."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if key != "ResponseMetadata"}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if hasattr(value, "read"):
        value = value.read(BODY_BYTES)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(bytes(value)).decode("ascii")
    return value
