"""How long hostile requests block the event loop of each server. The bound is 50 ms for any input below the server's limits.

Every route that takes a body gets bodies of the largest accepted size that are expensive to decode: long texts, many numbers, many
objects, deep nesting, brackets in strings. The policy server also gets requests that are expensive to encode, to render or to
compile. Clients run in threads and send prepared bytes; a task of the server's event loop measures how late it wakes up.

    python -m benchmarks.access.hostile [--servers policy ledger] [--max-mb 8]
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.wire.token_stream import MAX_FRAME_ITEMS, STREAM_PATH, ClientFrame, StreamedRequest
from tests.parts.access.servers import SERVERS, TOKEN, Running, policy_with_text

BOUND_MS = 50.0
PROBE_S = 0.001
REPLY_S = 20.0
SLOW_REPLY_S = 5.0


@dataclass
class Lag:
    """The longest time that the event loop did not run.

    Wall time, but no more than the processor time of the process: other processes of the machine do not count.
    """

    worst_s: float = 0.0

    async def watch(self) -> None:
        wall, used = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(PROBE_S)
            now, used_now = time.perf_counter(), time.process_time()
            self.worst_s = max(self.worst_s, min(now - wall - PROBE_S, used_now - used))
            wall, used = now, used_now


def text_bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """JSON of about `size` bytes. Servers refuse most of it by its fields, after they have decoded it."""
    words = b"some words, and more [of] them. "
    fields = (b"prompt", b"messages", b"data", b"tokens", b"groups")
    yield "a long text", b'{"prompt":"' + words * (size // len(words)) + b'"}'
    yield "a long text of escapes", b'{"prompt":"' + b'\\u00e9\\"' * (size // 8) + b'"}'
    yield "brackets in a string", b'{"prompt":"' + b"[{,}]" * (size // 5) + b'"}'
    yield "numbers", b'{"prompt":[' + b"1," * (size // 2) + b"1]}"
    yield "lists", b'{"prompt":[' + b"[1]," * (size // 4) + b"[1]]}"
    yield "objects", b'{"messages":[' + b'{"a":1},' * (size // 8) + b"{}]}"
    yield "strings", b'{"stop":[' + b'"a",' * (size // 4) + b'"a"]}'
    yield "keys", b'{"metadata":{' + b",".join(b'"%d":1' % at for at in range(size // 10)) + b"}}"
    yield "nesting", b"[" * size
    for field in fields:
        yield f"objects in {field.decode()}", b'{"%s":[' % field + b'{"a":[]},' * (min(size, 130_000) // 9) + b"{}]}"


def packed_bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """MessagePack of about `size` bytes."""
    count = size.to_bytes(4, "big")
    yield "msgpack numbers", b"\x81\xa6groups\xdd" + count + b"\x01" * size
    yield "msgpack lists", b"\x81\xa6groups\xdd" + count + b"\x90" * size
    yield "msgpack objects", b"\x81\xa6groups\xdd" + count + b"\x80" * size
    yield "msgpack nesting", b"\x91" * size


def policy_bodies() -> Iterator[tuple[str, str, bytes]]:
    """Requests below the limits of the policy server that are expensive after they were decoded."""

    def chat(**fields: object) -> bytes:
        return json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}], **fields}).encode()

    def text(**fields: object) -> bytes:
        return json.dumps({"max_tokens": 1, "prompt": "hello", **fields}).encode()

    long = "hello world, this is " * 24_000
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    schema = {"type": "object", "properties": {f"p{n}": {"enum": [f"v{m}" for m in range(20)]} for n in range(400)}}
    for name, route in (("completions", "/v1/completions"), ("tokenize", "/tokenize")):
        yield f"{name}: a long prompt", route, json.dumps({"prompt": long}).encode()
        yield f"{name}: blanks", route, json.dumps({"prompt": " " * 500_000}).encode()
        yield f"{name}: one long word", route, json.dumps({"prompt": "a" * 500_000}).encode()
    yield "1,024 prompts", "/v1/completions", text(prompt=["hello world " * 100] * 1024)
    yield "1,024 completions", "/v1/completions", text(n=1024)
    yield "100,000 stop strings", "/v1/completions", text(stop=["stop"] * 100_000)
    yield "64 long stop strings", "/v1/completions", text(stop=["a" * 1000 + str(n) for n in range(64)], max_tokens=200)
    yield "logit_bias", "/v1/completions", text(logit_bias={str(n): 1.0 for n in range(100_000)})
    yield "100,000 messages", "/v1/chat/completions", chat(messages=[{"role": "user", "content": "a"}] * 100_000)
    yield "4,000 messages", "/v1/chat/completions", chat(messages=[{"role": "user", "content": "hello " * 20}] * 4_000)
    yield "500 tools", "/v1/chat/completions", chat(tools=[tool] * 500)
    yield "500 forced tools", "/v1/chat/completions", chat(tools=[tool] * 500, tool_choice="required")
    yield (
        "a large schema",
        "/v1/chat/completions",
        chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}}),
    )
    for count in (1_000, 9_000):
        choices = [f"choice {n}" for n in range(count)]
        yield f"{count:,} choices", "/v1/completions", text(structured_outputs={"choice": choices})
    yield "a regex", "/v1/completions", text(structured_outputs={"regex": "(a|b|c){1,400}x(d?e?f?){1,200}"})
    yield "detokenize", "/detokenize", json.dumps({"tokens": [5] * 250_000}).encode()


def send(url: str, path: str, body: bytes, content_type: str) -> int:
    """The status; 0 if the server closed the connection, for example because the body is too large."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=REPLY_S)
    try:
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", path, body=body, headers=headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except OSError:
        return 0
    finally:
        connection.close()


async def stream_frames(url: str) -> None:
    """One frame with as many requests as are accepted, and one with more."""
    request = StreamedRequest.of(1, [1], SamplingParams(max_tokens=1), min_publication=0)
    for count in (MAX_FRAME_ITEMS, 20 * MAX_FRAME_ITEMS):
        frame = msgspec.msgpack.encode(ClientFrame([request] * count, []))
        async with aiohttp.ClientSession() as session, session.ws_connect(url + STREAM_PATH, max_msg_size=0) as socket:
            await socket.send_bytes(frame)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await socket.receive()


async def measure(name: str, max_bytes: int) -> tuple[float, str, Mapping[str, float], list[str]]:
    """The worst lag in milliseconds, the request that caused it, those above the bound, and requests answered with 5xx."""
    opened = policy_with_text if name == "policy" else SERVERS[name]
    slow: dict[str, float] = {}
    failed: list[str] = []
    worst, cause = 0.0, ""
    with tempfile.TemporaryDirectory() as folder:
        async with opened(Path(folder)) as server:
            limit = min(max_bytes, server.app._client_max_size)
            cases = [
                (f"{path}: {what}", path, body, kind) for path in posts(server) for what, body, kind in bodies(limit)
            ]
            if name == "policy":
                cases += [(what, path, body, "application/json") for what, path, body in policy_bodies()]
            lag = Lag()
            probe = asyncio.create_task(lag.watch())
            for what, path, body, kind in cases:
                await asyncio.sleep(0)
                lag.worst_s = 0.0
                began = time.perf_counter()
                status = await asyncio.to_thread(send, server.url, path, body, kind)
                if time.perf_counter() - began > SLOW_REPLY_S:
                    print_status(f"{name}: {what}: answered after {time.perf_counter() - began:.1f} s")
                await asyncio.sleep(0.01)
                if status >= 500 and status != 503:
                    failed.append(f"{what}: {status}")
                if lag.worst_s * 1000 > BOUND_MS:
                    # Once more: another process may have taken the processor.
                    first, lag.worst_s = lag.worst_s, 0.0
                    await asyncio.to_thread(send, server.url, path, body, kind)
                    await asyncio.sleep(0.01)
                    lag.worst_s = min(first, lag.worst_s)
                found = lag.worst_s * 1000
                if found > worst:
                    worst, cause = found, what
                if found > BOUND_MS:
                    slow[what] = round(found, 1)
            if name == "policy":
                lag.worst_s = 0.0
                await stream_frames(server.url)
                if lag.worst_s * 1000 > worst:
                    worst, cause = lag.worst_s * 1000, "frames of the token stream"
                if lag.worst_s * 1000 > BOUND_MS:
                    slow["frames of the token stream"] = round(lag.worst_s * 1000, 1)
            probe.cancel()
    return worst, cause, slow, failed


def posts(server: Running) -> list[str]:
    """Routes that take a body, without those that stop the server's work."""
    paths = {path for method, path in server.routes() if method in ("POST", "PUT", "*")}
    return sorted(paths - {"/pause", "/drain", "/sleep"})


def bodies(limit: int) -> Iterator[tuple[str, bytes, str]]:
    size = limit - 4096
    yield from ((what, body, "application/json") for what, body in text_bodies(size))
    yield from ((what, body, "application/msgpack") for what, body in packed_bodies(size))


async def main(servers: list[str], max_bytes: int) -> int:
    figures = []
    for name in servers:
        worst, cause, slow, failed = await measure(name, max_bytes)
        for what, found in slow.items():
            print_status(f"{name}: {what}: {found} ms")
        for what in failed:
            print_status(f"{name}: {what}")
        more = {"worst_request": cause, "above_the_bound": len(slow), "failed": len(failed)}
        figures.append(
            Figure(
                name=f"loop_lag_{name}",
                ours=round(worst, 1),
                peer=BOUND_MS,
                unit="ms",
                ratio=round(BOUND_MS / max(worst, 0.1), 2),
                floor=1.0,
                more=more,
            )
        )
    return print_figures(figures, max_body_bytes=max_bytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--max-mb", type=float, default=8.0, help="largest body, if a server accepts more")
    args = parser.parse_args()
    sys.exit(asyncio.run(main(args.servers, int(args.max_mb * 1e6))))
