"""What a test with many clients at once sees of a server (serving.py starts it), without blocking its event loop."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import serving

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/serve"))
import load

Address = tuple[str, int]

SCALE = float(os.environ.get("PAGEDKV_TEST_SCALE", "1"))
# A machine with other work gets so many times as long as a case allows; 1 is the case itself.
PATIENCE = float(os.environ.get("PAGEDKV_TEST_PATIENCE", "10"))
RING = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ring(first: int, length: int) -> str:
    """What CHAIN writes: so many letters from the given one on."""
    return "".join(RING[(first + i) % 26] for i in range(length))


def address(server: serving.Server) -> Address:
    return server.host, server.port


async def metrics(where: Address) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    status, text = await load.fetch(where, "GET", "/metrics")
    if status != 200:
        raise serving.ServingError(f"/metrics: HTTP {status}: {text[:500]}")
    return serving.parse_metrics(text)


def total(
    samples: dict[str, dict[frozenset[tuple[str, str]], float]], name: str, **labels: str
) -> float:
    return sum(
        value for have, value in samples.get(name, {}).items() if set(labels.items()) <= have
    )


async def activity(where: Address) -> tuple[int, int, int]:
    """(requests that run, that wait, pages held)"""
    m = await metrics(where)
    return (
        int(total(m, "pagedkv_requests_running")),
        int(total(m, "pagedkv_requests_waiting")),
        int(total(m, "pagedkv_pool_pages", state="held")),
    )


async def until(holds: Callable[[], Awaitable[bool]], seconds: float, what: str) -> float:
    """Seconds until `holds()` does; fails when that takes longer."""
    begin = time.monotonic()
    while not await holds():
        if time.monotonic() - begin > seconds:
            raise serving.ServingError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - begin


async def until_idle(where: Address, seconds: float) -> float:
    """Seconds until nothing runs or waits and no page is held; fails when that takes longer."""
    now = None

    async def idle() -> bool:
        nonlocal now
        now = await activity(where)
        return now == (0, 0, 0)

    try:
        return await until(idle, seconds, "an idle server")
    except serving.ServingError as e:
        raise serving.ServingError(f"{e} (running, waiting, pages held: {now})") from None


def threads(server: serving.Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/task"))


def allow_open_files(count: int) -> bool:
    """This process may hold so many; whether that could be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        return False
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return True


def mib(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"
