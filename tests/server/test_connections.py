"""1,000 clients at once, 16 of them running: none is dropped, /health answers, memory is bounded."""

from __future__ import annotations

import asyncio
import time

import pytest
from serving import CHAIN, Server
from watching import (
    PATIENCE,
    RING,
    Address,
    activity,
    address,
    allow_open_files,
    load,
    mib,
    ring,
    until,
    until_idle,
)

CLIENTS, RUNNING, TOKENS = 1000, 16, 24
MOST_GROWTH = 64 << 20


async def watch_health(where: Address, slowest: list[float]) -> None:
    while True:
        begin = time.monotonic()
        status, text = await load.fetch(where, "GET", "/health")
        assert status == 200, text
        slowest[0] = max(slowest[0], time.monotonic() - begin)
        await asyncio.sleep(0.05)


async def drive(server: Server) -> None:
    where = address(server)

    def ask(prompt: str, tokens: int) -> asyncio.Task[load.Answer]:
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
        return asyncio.create_task(load.post(where, "/v1/completions", body))

    async def counts(running: int, waiting: int) -> bool:
        return (await activity(where))[:2] == (running, waiting)

    await ask("A", 4)
    before = resident = server.resident_bytes()
    slowest = [0.0]
    health = asyncio.create_task(watch_health(where, slowest))
    running = [
        ask("A", 8000) for _ in range(RUNNING)
    ]  # so long that the others have come before their end
    await until(lambda: counts(RUNNING, 0), 30, "16 run")
    waiting = [ask(RING[i % 26], TOKENS) for i in range(CLIENTS - RUNNING)]
    await until(lambda: counts(RUNNING, len(waiting)), 60, "all others wait")
    while not all(task.done() for task in (*running, *waiting)):
        resident = max(resident, server.resident_bytes())
        await asyncio.sleep(0.05)
    health.cancel()
    print(
        f"{CLIENTS} clients: resident {mib(before)}, then {mib(resident)}; /health took {slowest[0] * 1e3:.0f} ms at most"
    )
    for i, task in enumerate((*running, *waiting)):
        answer = task.result()
        first, tokens = (0, 8000) if i < RUNNING else ((i - RUNNING) % 26, TOKENS)
        assert not answer.error, f"client {i}: {answer.error}"
        assert answer.text == ring(first + 1, tokens), f"client {i}"
    assert resident - before <= MOST_GROWTH
    assert slowest[0] <= 0.1 * PATIENCE
    await until_idle(where, 30)


def test_a_thousand_connections() -> None:
    if not allow_open_files(CLIENTS + 100):
        pytest.skip(f"this process may not open {CLIENTS + 100} files")
    with Server(CHAIN, "--max-num-seqs", str(RUNNING), "--max-waiting", str(CLIENTS)) as server:
        asyncio.run(drive(server))
