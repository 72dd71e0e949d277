#!/usr/bin/env python3
"""Drives an OpenAI-compatible server with streaming requests and reports what its clients see.

  bench/serve/load.py http://127.0.0.1:8000 --clients 16 --prompt-tokens 512 --answer-tokens 64

Every client sends --requests requests one after another, each with a part of the text of its own (of English, bench/model/topics_text.py),
cut to --prompt-tokens by the server's /tokenize. JSON to stdout. As a module: `post`, `run_clients`, `summary`, `Text`. The standard
library alone, one thread: a token costs the client some 50 microseconds.
"""
import argparse
import asyncio
import json
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.parse
from dataclasses import dataclass, field

TOPICS = pathlib.Path(__file__).resolve().parents[1] / "model/topics_text.py"


@dataclass
class Answer:
    """What one request's client saw; times in seconds on time.monotonic's clock."""
    sent: float = 0.0
    status: int = 0
    pieces: list = field(default_factory=list)  # when each piece of text came
    text: str = ""
    usage: dict = field(default_factory=dict)
    ended: float = 0.0
    error: str = ""
    finish_reason: str = ""

    @property
    def first(self):
        return self.pieces[0] - self.sent

    @property
    def gaps(self):
        return [b - a for a, b in zip(self.pieces, self.pieces[1:])]

    @property
    def cached(self):
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def read_head(reader):
    """Status and headers (names in lower case) of an HTTP answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(lines[0].split()[1]), headers


async def body_pieces(reader, headers):
    """The body as it comes."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
    elif "content-length" in headers:
        if length := int(headers["content-length"]):
            yield await reader.readexactly(length)
    else:
        while piece := await reader.read(65536):
            yield piece


def request_bytes(address, method, path, body=None, headers=()):
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", f"Host: {address[0]}:{address[1]}", "Content-Type: application/json",
            f"Content-Length: {len(data)}", "Connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


async def fetch(address, method, path, body=None):
    """(status, the body as text) of one plain request."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
    try:
        writer.write(request_bytes(address, method, path, body))
        status, headers = await read_head(reader)
        return status, b"".join([piece async for piece in body_pieces(reader, headers)]).decode()
    finally:
        writer.close()


def take_event(answer, event, now):
    if "error" in event:
        answer.error = json.dumps(event["error"])
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices") or []:
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text:
            answer.pieces.append(now)
            answer.text += text
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


async def post(address, path, body, answer=None):
    """Sends one streaming request and reads it to its end. Never raises for what the server does. A given `answer` is
    filled as it comes."""
    answer = answer or Answer()
    answer.sent = time.monotonic()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
        answer.sent = time.monotonic()
        writer.write(request_bytes(address, "POST", path, body))
        answer.status, headers = await read_head(reader)
        rest, done = b"", False
        async for piece in body_pieces(reader, headers):
            now = time.monotonic()
            rest += piece
            if answer.status != 200:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line.strip() == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    take_event(answer, json.loads(line[6:]), now)
        if answer.status != 200:
            answer.error = f"status {answer.status}: {rest[:300].decode(errors='replace')}"
        elif not done and not answer.error:
            answer.error = "the stream ended without [DONE]"
    except (OSError, ValueError, asyncio.IncompleteReadError) as e:
        answer.error = f"{type(e).__name__}: {e}"
    finally:
        answer.ended = time.monotonic()
        if writer is not None:
            writer.close()
    return answer


async def run_clients(address, path, bodies):
    """bodies[i]: what client i sends, one after another, all clients at once. The answers in the same shape."""
    async def client(own):
        return [await post(address, path, body) for body in own]
    return await asyncio.gather(*(client(own) for own in bodies))


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def summary(answers):
    """Of a list of answers that ran together: totals over the time from the first request to the last answer's end."""
    good = [a for a in answers if not a.error and a.pieces]
    out = {"requests": len(answers), "errors": [a.error or "no text came" for a in answers if a not in good][:3],
           "failed": len(answers) - len(good)}
    if not good:
        return out
    seconds = max(a.ended for a in answers) - min(a.sent for a in answers)
    prompt, new = (sum(a.usage.get(key, 0) for a in good) for key in ("prompt_tokens", "completion_tokens"))
    gaps = [gap for a in good for gap in a.gaps]
    first = [a.first for a in good]
    return out | {
        "seconds": round(seconds, 3), "prompt_tokens": prompt, "completion_tokens": new,
        "cached_tokens": sum(a.cached or 0 for a in good), "tokens_per_s": round(new / seconds, 2),
        "prompt_and_new_tokens_per_s": round((prompt + new) / seconds, 1),
        "ttft_s": {"median": round(statistics.median(first), 4), "p90": round(quantile(first, .9), 4), "max": round(max(first), 4)},
        "gap_ms": {"median": round(1e3 * statistics.median(gaps), 2), "p99": round(1e3 * quantile(gaps, .99), 2),
                   "max": round(1e3 * max(gaps), 2)} if gaps else None}


class Text:
    """A long English text, handed out in parts of so many tokens. No part repeats another."""

    def __init__(self, address):
        self.address = address
        self.words = subprocess.run([sys.executable, TOPICS], capture_output=True, text=True, check=True).stdout.split()
        self.next = 0

    async def count(self, text):
        status, body = await fetch(self.address, "POST", "/tokenize", {"content": text})
        if status != 200:
            raise RuntimeError(f"/tokenize: status {status}: {body[:300]}")
        return len(json.loads(body)["tokens"])

    async def take(self, num_tokens):
        """Whole words, of num_tokens tokens or the few less that a word leaves."""
        low, high = 1, num_tokens + 1  # words; a word is at least one token
        if self.next + high > len(self.words):
            raise ValueError("the text is used up")
        while high - low > 1:
            middle = (low + high) // 2
            fits = await self.count(" ".join(self.words[self.next:self.next + middle])) <= num_tokens
            low, high = (middle, high) if fits else (low, middle)
        part = " ".join(self.words[self.next:self.next + low])
        self.next += low
        return part


def parse_address(url):
    parts = urllib.parse.urlsplit(url)
    return parts.hostname, parts.port or 80


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1, help="of each client, one after another")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=64)
    args = parser.parse_args()
    address = parse_address(args.url)
    text = Text(address)
    bodies = [[{"prompt": await text.take(args.prompt_tokens), "max_tokens": args.answer_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
               for _ in range(args.requests)] for _ in range(args.clients)]
    answers = [a for own in await run_clients(address, "/v1/completions", bodies) for a in own]
    print(json.dumps(summary(answers), indent=1))
    return 1 if any(a.error for a in answers) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
