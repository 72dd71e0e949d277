"""Torments a server and holds it to leaving nothing behind.

CHAIN, whose right text is known, in a pool so small that requests are preempted. Many clients at once do at random what
clients do: whole requests, streams, several answers, cancels and disconnects while queued, computing and streaming, slow
readers, half-sent and malformed bodies, floods of headers, pipelined and kept connections, our own routes. Every answer
must be right; at the end no request is left, no page is held, open files and threads are what they were, memory is
bounded and SIGTERM ends it with status 0, without a sanitizer's report.

A minute, or PAGEDKV_TEST_SCALE minutes, or PAGEDKV_SOAK_SECONDS; PAGEDKV_SOAK_SEED for another course.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import serving
from watching import SCALE, Address, address, load, mib, ring, threads, total, until_idle

SECONDS = float(os.environ.get("PAGEDKV_SOAK_SECONDS") or 60 * SCALE)
SEED = os.environ.get("PAGEDKV_SOAK_SEED", "1")
NUM_CLIENTS = 40
CONTEXT, POOL_PAGES, RUNNING, WAITING, CONNECTIONS = 1024, 96, 8, 24, 72
REFUSALS = (429, 503)  # too many wait, too many connections
# Of resident memory, from a third of the time on; sanitizers keep what was freed for a while.
MOST_GROWTH = 32 << 20
MOST_PROBLEMS = 5


def expect(condition: bool, *facts: object) -> None:
    if not condition:
        raise serving.ServingError(" ".join(map(str, facts)))


class Request:
    """A random one, whose right text is known."""

    def __init__(self, rng: random.Random, most_tokens: int = 300, **fields: object) -> None:
        length, self.tokens = (
            rng.choice([1, 3, 16, 40, 150, 300]),
            rng.choice([t for t in (1, 5, 20, 100, 300) if t <= most_tokens]),
        )
        first = rng.choice([0, 0, 0, rng.randrange(26)])  # many begin alike and share pages
        self.prompt, self.answer = ring(first, length), ring(first + length, self.tokens)
        self.chat = rng.random() < 0.5
        self.path = "/v1/chat/completions" if self.chat else "/v1/completions"
        self.body = {
            "max_tokens": self.tokens,
            "temperature": 0,
            "priority": rng.choice([0, 0, 0, 1, -1]),
            **fields,
        }
        if self.chat:
            self.body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            self.body["prompt"] = self.prompt
        if rng.random() < 0.2:
            self.body["logprobs"] = True if self.chat else 3
        if rng.random() < 0.2:
            self.body["cache_salt"] = rng.choice(["one", "two"])

    def text(self, choice: Any) -> str:
        if not self.chat:
            return choice.get("text") or ""
        return (choice.get("message") or choice.get("delta") or {}).get("content") or ""

    def check(self, status: int, text: str, what: str) -> str:
        if status in REFUSALS:
            return "refused"
        expect(status == 200, what, "status", status, text[:300])
        expect(
            text == self.answer,
            what,
            "prompt",
            self.prompt,
            "tokens",
            self.tokens,
            "text",
            text,
            "instead of",
            self.answer,
        )
        return "right"


class Client:
    """One connection. What the server may do to it at any time (close it when there are too many) is OSError or EOFError."""

    def __init__(self, where: Address, small_window: bool = False) -> None:
        self.where, self.small_window = where, small_window

    async def __aenter__(self) -> Client:
        if not self.small_window:
            self.reader, self.writer = await asyncio.open_connection(*self.where)
        else:
            s = socket.socket()
            s.setblocking(False)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            await asyncio.get_running_loop().sock_connect(s, self.where)
            self.reader, self.writer = await asyncio.open_connection(sock=s, limit=4096)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.small_window:
            self.writer.transport.abort()
        else:
            self.writer.close()

    def send(self, method: str, path: str, body: Any = None, keep: bool = False) -> None:
        data = load.request_bytes(self.where, method, path, body)
        self.writer.write(
            data.replace(b"Connection: close", b"Connection: keep-alive", 1) if keep else data
        )

    async def answer(self) -> tuple[int, str, dict[str, str]]:
        status, headers = await load.read_head(self.reader)
        return (
            status,
            b"".join([piece async for piece in load.body_pieces(self.reader, headers)]).decode(),
            headers,
        )

    async def events(self) -> AsyncIterator[tuple[int, str]]:
        """(status, what follows "data: ") of each event; an error's body is one event."""
        status, headers = await load.read_head(self.reader)
        rest = b""
        async for piece in load.body_pieces(self.reader, headers):
            if status != 200:
                yield status, piece.decode()
                continue
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    yield status, line[6:].decode()


async def whole(rng: random.Random, where: Address) -> str:
    r = Request(rng)
    async with Client(where) as c:
        c.send("POST", r.path, r.body)
        status, body, _ = await c.answer()
    return r.check(
        status, r.text(json.loads(body)["choices"][0]) if status == 200 else body, "whole"
    )


async def stream(rng: random.Random, where: Address) -> str:
    r = Request(rng, stream=True, stream_options={"include_usage": True})
    text, last, status = "", "", 0
    async with Client(where) as c:
        c.send("POST", r.path, r.body)
        async for status, data in c.events():
            last = data
            if status != 200:
                break
            if data != "[DONE]":
                event = json.loads(data)
                expect("error" not in event, "stream: error", data)
                text += "".join(r.text(choice) for choice in event["choices"])
    if status == 200:
        expect(last == "[DONE]", "stream ended with", last)
    return r.check(status, text if status == 200 else last, "stream")


async def several(rng: random.Random, where: Address) -> str:
    r = Request(rng, most_tokens=100, n=rng.choice([2, 3, 4]))
    async with Client(where) as c:
        c.send("POST", r.path, r.body)
        status, body, _ = await c.answer()
    if status != 200:
        return r.check(status, body, "several")
    for choice in json.loads(body)["choices"]:
        r.check(status, r.text(choice), "several")
    return "right"


async def leave_stream(rng: random.Random, where: Address) -> str:
    r = Request(rng, stream=True, n=rng.choice([1, 1, 3]))
    async with Client(where) as c:
        c.send("POST", r.path, r.body)
        left = rng.choice([0, 1, 2, 10, 50])
        async for _ in c.events():
            left -= 1
            if left < 0:
                break
    return "left"


async def leave_whole(rng: random.Random, where: Address) -> str:
    r = Request(rng, n=rng.choice([1, 1, 3]))
    async with Client(where) as c:
        c.send("POST", r.path, r.body)
        await c.writer.drain()
        await asyncio.sleep(rng.choice([0, 0.001, 0.02, 0.2]))
    return "left"


async def burst(rng: random.Random, where: Address) -> str:
    """More than may wait, all left at once: most are queued or refused."""

    async def one() -> None:
        r = Request(rng, stream=rng.random() < 0.5)
        async with Client(where) as c:
            c.send("POST", r.path, r.body)
            await c.writer.drain()
            await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(30)), return_exceptions=True)
    return "left"


async def slow_reader(rng: random.Random, where: Address) -> str:
    body = {"prompt": "A", "max_tokens": 1000, "temperature": 0, "stream": True, "logprobs": 5}
    async with Client(where, small_window=True) as c:
        c.send("POST", "/v1/completions", body)
        for _ in range(rng.choice([3, 20])):
            await asyncio.sleep(0.1)
            if not await c.reader.read(500):
                break
    return "left"


async def half_sent(rng: random.Random, where: Address) -> str:
    data = load.request_bytes(
        where, "POST", "/v1/completions", {"prompt": "A" * 300, "max_tokens": 5}
    )
    async with Client(where) as c:
        c.writer.write(data[: rng.randrange(len(data))])
        await c.writer.drain()
        await asyncio.sleep(rng.choice([0, 0, 0.1, 1]))
    return "left"


BROKEN_BODIES = [
    b"{",
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{" * 5000,
    b'{"prompt":' * 2000,
    b"[" * 100000,
    b'{"prompt": "A", "max_tokens": "five"}',
    b'{"prompt": "A", "max_tokens": -1}',
    b'{"prompt": "A", "max_tokens": 1e99}',
    b'{"prompt": "A", "n": 0}',
    b'{"prompt": "A", "n": 100000}',
    b'{"prompt": "A", "temperature": "hot"}',
    b'{"prompt": "A", "temperature": -1}',
    b'{"prompt": [1, 99999999]}',
    b'{"prompt": [-1]}',
    b'{"prompt": "A", "stop": [1, 2]}',
    b'{"prompt": "A", "stop": ["a", "b", "c", "d", "e"]}',
    b'{"prompt": "A", "seed": "x"}',
    b'{"prompt": "A", "logit_bias": {"x": 1}}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "A", "cache_salt": ""}',
    b'{"prompt": "A", "stream": "yes"}',
    b'{"prompt": "A", "logprobs": 1000}',
    b'{"max_tokens": 5}',
    b"\x00\x01\x02",
    b'{"prompt": "' + b"A" * 3000 + b'"}',
    b'{"prompt": "A", "tools": [{"type": "function"}]}',
]
BROKEN_CHATS = [
    b'{"messages": []}',
    b'{"messages": "hello"}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"content": "x"}]}',
    b'{"messages": [1]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": "nobody", "content": "x"}], "n": "2"}',
    b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 21, "logprobs": true}',
]


async def malformed(rng: random.Random, where: Address) -> str:
    chat = rng.random() < 0.3
    body = rng.choice(BROKEN_CHATS if chat else BROKEN_BODIES)
    head = (
        f"POST /v1/{'chat/' if chat else ''}completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    async with Client(where) as c:
        c.writer.write(head.encode() + body)
        status, text, _ = await c.answer()
    expect(
        status in (400, 404, 413, 415, *REFUSALS),
        "malformed",
        body[:80],
        "status",
        status,
        text[:300],
    )
    if status == 400:
        error = json.loads(text)["error"]
        expect(
            error["message"] and error["type"] == "invalid_request_error",
            "malformed",
            body[:80],
            text[:300],
        )
    return "refused"


GARBAGE = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"A" * 20000,
    b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    b"GET /%00%ff%zz?a=%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 8\r\n\r\n--x\r\n--x",
    b"GET /health HTTP/1.1\r\nRange: bytes=0-1,5-9,-1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
]


async def garbage(rng: random.Random, where: Address) -> str:
    async with Client(where) as c:
        c.writer.write(rng.choice(GARBAGE))
        await c.writer.drain()
        if rng.random() < 0.5:
            c.writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(c.reader.read(65536), rng.choice([0.05, 0.5]))
    return "left"


async def header_flood(rng: random.Random, where: Address) -> str:
    async with Client(where) as c:
        c.writer.write(b"GET /health HTTP/1.1\r\n")
        for i in range(rng.choice([50, 500, 5000])):
            c.writer.write(f"X-Flood-{i}: {'f' * rng.choice([10, 100])}\r\n".encode())
            if i % 100 == 0:
                await c.writer.drain()
        c.writer.write(b"Connection: close\r\n\r\n")
        status, _, _ = await c.answer()
    expect(status in (200, 400, 413, 414, 431, *REFUSALS), "header flood", status)
    return "answered"


async def pipelined(rng: random.Random, where: Address) -> str:
    """The second may be dropped with the connection, never mixed up with the first."""
    r = Request(rng, most_tokens=20)
    async with Client(where) as c:
        c.send("POST", r.path, r.body, keep=True)
        c.send("GET", "/health", keep=True)
        status, body, _ = await c.answer()
        outcome = r.check(
            status, r.text(json.loads(body)["choices"][0]) if status == 200 else body, "pipelined"
        )
        try:
            status, _, _ = await asyncio.wait_for(c.answer(), 0.5)
            expect(status in (200, 400, *REFUSALS), "pipelined second", status)
        except asyncio.TimeoutError:
            pass
    return outcome


async def kept(rng: random.Random, where: Address) -> str:
    async with Client(where) as c:
        for _ in range(rng.choice([2, 5, 20])):
            if rng.random() < 0.5:
                c.send("GET", "/health", keep=True)
                status, body, headers = await c.answer()
                expect(status in (200, 503), "kept: /health", status, body[:200])
            else:
                r = Request(rng, most_tokens=20)
                c.send("POST", r.path, r.body, keep=True)
                status, body, headers = await c.answer()
                r.check(
                    status,
                    r.text(json.loads(body)["choices"][0]) if status == 200 else body,
                    "kept",
                )
            if headers.get("connection", "").lower() == "close":
                break
    return "right"


READS = [
    "/metrics",
    "/v1/models",
    "/v1/kv/pool",
    "/v1/kv/pages",
    "/v1/kv/prefixes",
    "/slots",
    "/props",
    "/version",
]


async def look(rng: random.Random, where: Address) -> str:
    path = rng.choice(READS)
    async with Client(where) as c:
        c.send("GET", path)
        status, body, _ = await c.answer()
    expect(status in (200, 503), path, "status", status, body[:200])
    if status == 200 and path == "/metrics":
        held = total(serving.parse_metrics(body), "pagedkv_pool_pages", state="held")
        expect(0 <= held <= POOL_PAGES, "held pages", held)
    return "right"


async def explain(rng: random.Random, where: Address) -> str:
    r = Request(rng)
    async with Client(where) as c:
        c.send("POST", "/v1/kv/explain", {"prompt": r.prompt})
        status, body, _ = await c.answer()
    expect(status in (200, 503), "/v1/kv/explain", status, body[:200])
    return "right"


async def watch_events(rng: random.Random, where: Address) -> str:
    async with Client(where) as c:
        c.send("GET", "/v1/kv/events")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(c.reader.read(1000), rng.choice([0.1, 1]))
    return "left"


async def forget(rng: random.Random, where: Address) -> str:
    async with Client(where) as c:
        c.send("POST", "/reset_prefix_cache")
        status, body, _ = await c.answer()
    expect(status in (200, 503), "/reset_prefix_cache", status, body[:200])
    return "right"


ACTIONS: dict[Callable[[random.Random, Address], Coroutine[Any, Any, str]], float] = {
    whole: 8,
    stream: 8,
    several: 3,
    leave_stream: 6,
    leave_whole: 6,
    burst: 0.3,
    slow_reader: 2,
    half_sent: 3,
    malformed: 6,
    garbage: 3,
    header_flood: 1,
    pipelined: 2,
    kept: 2,
    look: 4,
    explain: 1,
    watch_events: 1,
    forget: 0.2,
}


class Soak:
    def __init__(self, where: Address) -> None:
        self.where = where
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.slowest_health = 0.0

    async def client(self, index: int, end: float) -> None:
        rng = random.Random(f"{SEED}/{index}")
        while time.monotonic() < end and len(self.problems) < MOST_PROBLEMS:
            (action,) = rng.choices(list(ACTIONS), list(ACTIONS.values()))
            try:
                outcome = await asyncio.wait_for(action(rng, self.where), serving.ANSWER_SECONDS)
            except (AssertionError, ValueError, asyncio.TimeoutError) as e:
                outcome = "wrong"
                self.problems.append(f"{action.__name__}: {e or 'no end in time'!r}")
            except (
                OSError,
                EOFError,
            ) as e:  # closed by the server, as it may when there are too many connections
                outcome = f"closed ({type(e).__name__})"
            self.outcomes[f"{action.__name__}: {outcome}"] += 1

    async def watch_health(self, end: float) -> None:
        while time.monotonic() < end:
            begin = time.monotonic()
            try:
                status, body = await load.fetch(self.where, "GET", "/health")
                expect(status == 200, "/health", status, body[:200])
            except AssertionError as e:
                self.problems.append(str(e))
            except (OSError, EOFError) as e:
                self.problems.append(f"/health: {e!r}")
            self.slowest_health = max(self.slowest_health, time.monotonic() - begin)
            await asyncio.sleep(0.2)

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(
            self.watch_health(end), *(self.client(i, end) for i in range(NUM_CLIENTS))
        )


def test_soak() -> None:
    flags = ["-c", str(CONTEXT), "--no-dynamic", "--num-blocks", str(POOL_PAGES)]
    flags += ["--max-num-seqs", str(RUNNING), "--max-waiting", str(WAITING)]
    flags += ["--max-connections", str(CONNECTIONS)]
    with serving.Server(
        serving.CHAIN, *flags, env={"ASAN_OPTIONS": "quarantine_size_mb=8"}
    ) as server:
        server.post("/v1/completions", {"prompt": "A", "max_tokens": 4}).ok()
        before = server.open_files(), threads(server)
        soak = Soak(address(server))
        asyncio.run(soak.run(SECONDS / 3))
        resident = server.resident_bytes()
        asyncio.run(soak.run(SECONDS * 2 / 3))
        for what, count in sorted(soak.outcomes.items()):
            print(f"{count:7} {what}")
        assert not soak.problems, "\n".join(soak.problems)
        asyncio.run(until_idle(soak.where, 60))
        preemptions = server.metric("pagedkv_preemptions_total")
        print(f"{preemptions:.0f} preemptions; /health took {soak.slowest_health * 1e3:.0f} ms at most; resident {mib(resident)} after a "
              f"third, {mib(server.resident_bytes())} at the end")  # fmt: skip
        assert preemptions > 0
        assert server.resident_bytes() <= resident + MOST_GROWTH

        def is_as_before() -> bool:
            return server.open_files() <= before[0] + 2 and threads(server) <= before[1] + 2

        serving.wait_until(is_as_before, f"open files and threads back at {before}", 30)
        answer = server.post("/v1/completions", {"prompt": "ABC", "max_tokens": 7}).ok()
        assert answer["choices"][0]["text"] == "DEFGHIJ"
