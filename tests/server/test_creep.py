"""Memory and speed stay what they are over thousands of requests (FC-33): 5,000 with PAGEDKV_TEST_SCALE=10, else 500.

Prompts of 1 to 200 tokens, each another; 16 tokens answered; one in ten cancelled; a pool that is full early on."""

from __future__ import annotations

import asyncio
import random
import time

from serving import CHAIN, Server
from watching import SCALE, Address, address, load, mib, ring, until_idle

COUNT = round(500 * min(SCALE, 10))
TENTH = COUNT // 10
AT_ONCE = 8
KEPT = 4 << 20  # by the allocator, beyond the case's two per cent


async def cancel(where: Address, body: dict[str, object]) -> None:
    _, writer = await asyncio.open_connection(*where)
    writer.write(load.request_bytes(where, "POST", "/v1/completions", body))
    await writer.drain()
    await asyncio.sleep(0.005)
    writer.close()


async def drive(server: Server) -> None:
    where, rng = address(server), random.Random(7)
    numbers = iter(range(1, COUNT + 1))
    resident, times = {}, {}

    async def client() -> None:
        for i in numbers:
            prompt = "".join(rng.choice("0123456789") for _ in range(rng.randint(0, 199))) + "A"
            body = {"prompt": prompt, "max_tokens": 16, "stream": True, "temperature": 0}
            if i % 10 == 0:
                await cancel(where, body)
            else:
                answer = await load.post(where, "/v1/completions", body)
                assert not answer.error and answer.text == ring(1, 16), f"request {i}: {answer}"
            if i % TENTH == 0:
                resident[i // TENTH], times[i // TENTH] = server.resident_bytes(), time.monotonic()

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    await until_idle(where, 30)
    second, last = times[2] - times[1], times[10] - times[9]
    print(
        f"{COUNT} requests: resident {mib(resident[1])} after {TENTH}, {mib(resident[10])} after all; the last {TENTH} took {last:.2f} s, "
        f"{last / second:.2f} of the second {TENTH}"
    )
    assert resident[10] <= 1.02 * resident[1] + KEPT
    assert last <= 5 * second  # 1.05 on a machine that does nothing else


def test_memory_and_speed_stay() -> None:
    with Server(
        CHAIN, "--max-num-seqs", str(AT_ONCE), "--no-dynamic", "--num-blocks", "256", "-c", "2048"
    ) as server:
        asyncio.run(drive(server))
