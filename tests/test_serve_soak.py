"""Many requests of every kind, good and bad, with clients that leave at random: nothing leaks, all counters add up.

``SPECLI_SOAK=1000 pytest tests/test_serve_soak.py`` for the long one.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
from collections import Counter
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")

N = int(os.environ.get("SPECLI_SOAK", "60"))
AT_A_TIME = 12
CALM_S = 60.0
FATES = (
    ["whole"] * 5
    + ["stream"] * 3
    + ["leaves stream"] * 4
    + ["leaves"] * 3
    + ["no json", "too long", "no field", "no route"]
)


def rss_mib(pid: int) -> float:
    """Resident memory."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


class Crowd:
    """Clients, each with its fate. ``seen``: what came of them; ``tokens``: what those who stayed were told."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.tokens = 0

    async def run(self, n: int) -> None:
        self._places = asyncio.Semaphore(AT_A_TIME)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            await asyncio.gather(*(self._one(client, i, self.rng.choice(FATES)) for i in range(n)))

    async def _one(self, client, i: int, fate: str) -> None:
        async with self._places:
            body = {
                "messages": [{"role": "user", "content": f"{i} " + "tell me more " * self.rng.randint(1, 60)}],
                "max_tokens": self.rng.randint(1, 24),
                "temperature": self.rng.choice([0, 0.8, 1.5]),
                "n": self.rng.choice([1, 1, 2]),
            }
            route = "/v1/chat/completions"
            if fate == "no json":
                await self._expect(client, 400, fate, route, content=b'{"messages": [')
            elif fate == "too long":
                await self._expect(
                    client, 400, fate, route, json={**body, "messages": [{"role": "user", "content": "x " * 9000}]}
                )
            elif fate == "no field":
                await self._expect(client, 400, fate, route, json={**body, "best_off": 3})
            elif fate == "no route":
                await self._expect(client, 404, fate, "/v1/answers", json=body)
            elif fate == "whole":
                reply = await self._expect(client, 200, fate, route, json=body)
                self.tokens += reply.json()["usage"]["completion_tokens"]
            elif fate == "leaves":
                with pytest.raises((httpx.TimeoutException, httpx.TransportError)):
                    await client.post(route, json={**body, "max_tokens": 900}, timeout=self.rng.uniform(0.001, 0.3))
                self.seen[fate] += 1
            else:
                await self._stream(
                    client, fate, route, {**body, "stream": True, "stream_options": {"include_usage": True}}
                )

    async def _expect(self, client, status: int, fate: str, route: str, **what):
        reply = await client.post(route, **what)
        assert reply.status_code == status, reply.text
        self.seen[fate] += 1
        return reply

    async def _stream(self, client, fate: str, route: str, body: dict) -> None:
        patience = self.rng.randint(0, 6) if fate == "leaves stream" else 10**6
        if fate == "leaves stream":
            body["max_tokens"] = 900
        async with client.stream("POST", route, json=body) as reply:
            assert reply.status_code == 200
            last = ""
            async for line in reply.aiter_lines():
                last = line or last
                patience -= 1
                if patience < 0:
                    break
        if fate == "stream":
            assert last == "data: [DONE]"
        self.seen[fate] += 1


async def calm(url: str) -> dict[str, float]:
    """The counters once nothing runs or waits."""
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(int(CALM_S / 0.05)):
            found = samples((await client.get("/metrics")).text)
            if found["specli_requests_running"] == found["specli_requests_waiting"] == 0:
                return found
            await asyncio.sleep(0.05)
    raise AssertionError("something still runs")


@pytest.mark.model
def test_a_thousand_requests_leave_nothing_behind(specli, q4_0_path, draft_path):
    arguments = [
        "-m",
        q4_0_path,
        "-md",
        draft_path,
        "-c",
        "2048",
        "-np",
        "4",
        "--queue",
        "1000",
        "--port",
        "0",
        "-t",
        "1",
    ]
    with specli.start("serve", *arguments) as process:
        url = ""
        while not url:
            line = process.stderr.readline().decode()
            assert line, "the server ended"
            if found := re.search(r"listening at (\S+)", line):
                url = found[1]
        log = threading.Thread(target=process.stderr.read)  # or the pipe fills, and the server waits for it
        log.start()
        crowd = Crowd(url, 1)
        asyncio.run(crowd.run(N // 2))
        asyncio.run(calm(url))
        half_mib = rss_mib(process.pid)
        asyncio.run(crowd.run(N - N // 2))
        counted = asyncio.run(calm(url))
        assert sum(crowd.seen.values()) == N
        assert rss_mib(process.pid) < 1.1 * half_mib + 20, "memory does not grow with requests"
        finished = {name: value for name, value in counted.items() if name.startswith("specli_requests_finished_total")}
        assert (
            counted["specli_requests_aborted_total"] == finished['specli_requests_finished_total{reason="cancelled"}']
        )
        assert counted['specli_requests_refused_total{kind="engine"}'] == 0
        assert counted['specli_requests_refused_total{kind="too_long"}'] == crowd.seen["too long"]
        assert counted["specli_generation_tokens_total"] >= crowd.tokens
        accepted = counted["specli_spec_decode_num_accepted_tokens_total"]
        positions = [
            v for name, v in counted.items() if name.startswith("specli_spec_decode_num_accepted_tokens_per_pos")
        ]
        assert sum(positions) == accepted <= counted["specli_spec_decode_num_draft_tokens_total"]
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 5, "temperature": 0},
            timeout=60,
        )
        assert reply.json()["usage"]["completion_tokens"] == 5
