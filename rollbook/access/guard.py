"""Refuses requests that a web page in a browser could have caused. Every server of this package runs behind it.

A server on loopback can be reached by every page that a browser on the same machine shows. Three checks close that:

- The `Host` header names an address of the server, this machine, or a configured name. Otherwise a page could give its own name the
  address 127.0.0.1 and read our responses (DNS rebinding).
- A request that a browser sends for a page of another origin is refused. Browsers mark them with `Origin` or `Sec-Fetch-Site`.
- A request with a body declares JSON or MessagePack. Browsers send those types to other origins only after a preflight request.

The rule for CORS: an origin in `AllowedClients.origins` passes; `*` allows every origin. Only such requests reach a handler that
sends CORS headers.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from multidict import istr

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SEC_FETCH_SITE = istr("Sec-Fetch-Site")
SEC_FETCH_MODE = istr("Sec-Fetch-Mode")
OWN_SITES = ("same-origin", "none")
"""`none`: the user entered the address."""
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
BODY_TYPES = frozenset({"application/json", "application/msgpack", "application/x-msgpack"})
EMPTY_BODY_TYPES = frozenset({None, "application/octet-stream"})
"""What clients declare for a request without a body."""
MAX_KNOWN_HOSTS = 256
"""Accepted `Host` headers that are remembered; clients of one server use few."""


class Problem(StrEnum):
    """Why a request is refused."""

    HOST = "host"
    ORIGIN = "origin"
    CONTENT_TYPE = "content_type"

    @property
    def status(self) -> int:
        return 415 if self is Problem.CONTENT_TYPE else 403


Refuse = Callable[[web.Request, Problem, str], web.StreamResponse]
"""Makes the response of a refused request, in the format of the server's API."""
REFUSE: web.AppKey[Refuse] = web.AppKey("refuse")


@dataclass(frozen=True, slots=True)
class AllowedClients:
    """Additional host names of a server, and additional origins whose pages may call it."""

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, hosts: Iterable[str], origins: Iterable[str]) -> Self:
        """Parses what a user typed: `Ledger.example`, `https://app.example/`."""
        return cls(
            frozenset(host.strip().lower() for host in hosts),
            frozenset(origin.strip().lower().rstrip("/") for origin in origins),
        )


def is_loopback(host: str) -> bool:
    """Whether a server on this host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_allowed_host(header: str, *, is_local: bool, allowed: AllowedClients) -> bool:
    """Whether a `Host` header names this server. `is_local`: the server listens on loopback only.

    A server that other machines can reach accepts every IP address, because address translation can hide its own, and a name is
    needed for DNS rebinding.
    """
    name = _host_name(header)
    if name in ("localhost", socket.gethostname().lower()) or name in allowed.hosts:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not (is_local or address.is_unspecified)


def is_foreign(headers: Mapping[str, str], allowed: AllowedClients) -> bool:
    """Whether a browser sends this request for a page of another origin."""
    origin = headers.get(hdrs.ORIGIN)
    if origin is not None:
        if origin in allowed.origins or "*" in allowed.origins:
            return False
        return origin.partition("://")[2] != headers.get(hdrs.HOST)
    return headers.get(SEC_FETCH_SITE, "none") not in OWN_SITES


def is_browser(request: web.Request) -> bool:
    """Whether a browser sent this request, for whatever page. For a GET that changes something, such as in the Atropos API."""
    headers = request.headers
    return (
        SEC_FETCH_SITE in headers or hdrs.ORIGIN in headers or headers.get(hdrs.USER_AGENT, "").startswith("Mozilla/")
    )


def is_own_page(request: web.Request) -> bool:
    """Whether a script of a page of this server sent this request, and not a link, an image or a page of another site.

    Browsers send `Sec-Fetch-Site` only over HTTPS and to loopback. Elsewhere the referrer tells: no page can set another origin.
    """
    headers = request.headers
    if SEC_FETCH_SITE in headers:
        return headers[SEC_FETCH_SITE] == "same-origin" and headers.get(SEC_FETCH_MODE) in ("cors", "same-origin")
    origin = headers.get(hdrs.REFERER, "").partition("://")[2].partition("/")[0]
    return bool(origin) and origin == headers.get(hdrs.HOST)


def guard(*, is_local: bool, allowed: AllowedClients, refuse: Refuse) -> Middleware:
    known_hosts: set[str] = set()

    def problem_of(request: web.Request) -> tuple[Problem, str] | None:
        headers = request.headers
        # A browser always sends `Host`; a health check may not.
        host = headers.get(hdrs.HOST)
        if host is not None and host not in known_hosts:
            if not is_allowed_host(host, is_local=is_local, allowed=allowed):
                return Problem.HOST, f"this server is not known as {host[:200]!r}; allow the name with --allow-host"
            if len(known_hosts) < MAX_KNOWN_HOSTS:
                known_hosts.add(host)
        if (hdrs.ORIGIN in headers or SEC_FETCH_SITE in headers) and is_foreign(headers, allowed):
            origin = headers.get(hdrs.ORIGIN, "another site")
            return Problem.ORIGIN, f"pages of {origin[:200]} may not call this server; allow them with --allow-origin"
        if request.method in BODY_METHODS:
            declared = headers.get(hdrs.CONTENT_TYPE)
            if declared not in BODY_TYPES and not _is_body_type_allowed(declared, request):
                return (
                    Problem.CONTENT_TYPE,
                    f"the content type is {declared}; send application/json or application/msgpack",
                )
        return None

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        problem = problem_of(request)
        if problem is None:
            return await handler(request)
        return refuse(request, *problem)

    return check


def _is_body_type_allowed(declared: str | None, request: web.Request) -> bool:
    if declared in EMPTY_BODY_TYPES:
        return not request.can_read_body
    kind = str(declared).partition(";")[0].strip().lower()
    return kind in BODY_TYPES or (kind.startswith("application/") and kind.endswith("+json"))


def _host_name(header: str) -> str:
    """The name in a `Host` header, without port, brackets and the final dot of a complete DNS name."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0].rstrip(".") if name.count(":") == 1 else name.rstrip(".")
