"""A client that is gone is noticed within a second, whether its request streams, computes or waits; a request that
waited never starts (FC-16). 200 closes in rounds of 20, half of them streaming.

SmolLM2: CHAIN would write its 8,000 tokens before all have come."""

from __future__ import annotations

import asyncio

from serving import SMOLQ, Server
from watching import (
    PATIENCE,
    Address,
    activity,
    address,
    load,
    metrics,
    mib,
    threads,
    total,
    until,
    until_idle,
)

ROUNDS, RUNNING, WAITING = 10, 4, 16


class Asker:
    """Asks for 8,000 tokens and reads what comes until it leaves."""

    def __init__(self, where: Address, stream: bool) -> None:
        self.where, self.stream = where, stream

    async def ask(self) -> Asker:
        reader, self.writer = await asyncio.open_connection(*self.where)
        body = {"prompt": "A", "max_tokens": 8000, "ignore_eos": True, "stream": self.stream}
        self.writer.write(load.request_bytes(self.where, "POST", "/v1/completions", body))
        self.task = asyncio.create_task(self.read(reader))
        return self

    async def read(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass
        raise AssertionError("the answer ended before its client left")

    def leave(self) -> None:
        if self.task.done():
            self.task.result()
        self.task.cancel()
        if self.stream:
            self.writer.transport.abort()
        else:
            self.writer.close()


async def one_round(where: Address) -> float:
    """Seconds until the server had noticed, at most."""

    async def ask(count: int) -> list[Asker]:
        return list(
            await asyncio.gather(*(Asker(where, stream=i % 2 == 0).ask() for i in range(count)))
        )

    async def counts(running: int, waiting: int) -> bool:
        return (await activity(where))[:2] == (running, waiting)

    running = await ask(RUNNING)
    await until(lambda: counts(RUNNING, 0), 30, "they run")
    waiting = await ask(WAITING)
    await until(lambda: counts(RUNNING, WAITING), 30, "they wait")
    for asker in waiting:
        asker.leave()
    seconds = await until(lambda: counts(RUNNING, 0), PATIENCE, "nobody waits who is gone")
    for asker in running:
        asker.leave()
    return max(seconds, await until_idle(where, PATIENCE))


def test_gone_clients_leave_nothing_behind() -> None:
    with Server(SMOLQ, "--no-enable-prefix-caching", "--max-num-seqs", str(RUNNING)) as server:
        where = address(server)

        def held() -> tuple[int, int, int]:
            return server.resident_bytes(), server.open_files(), threads(server)

        slowest = asyncio.run(one_round(where))
        before = held()  # what the first ones set up stays
        for _ in range(ROUNDS - 1):
            slowest = max(slowest, asyncio.run(one_round(where)))
        after = held()
        started = total(
            asyncio.run(metrics(where)), "pagedkv_request_prompt_tokens_total"
        )  # prompts of one token
        print(
            f"{ROUNDS * (RUNNING + WAITING)} closes, noticed within {slowest * 1e3:.0f} ms; resident {mib(before[0])}, then {mib(after[0])}"
        )
        assert started == ROUNDS * RUNNING
        assert after[0] <= before[0] + (8 << 20)
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + 2
