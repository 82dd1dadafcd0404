"""Many requests of every kind, good and bad, with clients that leave at random: nothing leaks, all counters add up.

While nobody leaves they equal what the clients counted, to the choice and the token. Of those who leave some never
arrive, and nobody but the server knows how far the others came: there it is bounds, and sums of the counters alone.

``SPECLI_SOAK=1000 pytest tests/test_serve_soak.py`` for the long one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from specli.serve.metrics import FINISHES, REFUSALS  # noqa: E402

N = int(os.environ.get("SPECLI_SOAK", "60"))
AT_A_TIME = 12
CALM_S = 60.0
PATIENT = ["whole"] * 5 + ["stream"] * 3 + ["no json", "too long", "no field", "no route"]
FATES = PATIENT + ["leaves stream"] * 4 + ["leaves"] * 3
LONG = 900  # tokens, for those who leave before


def rss_mib(pid: int) -> float:
    """Resident memory."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


class Crowd:
    """Clients, each with its fate. ``seen``: what came of them.

    ``told``: what those who stayed were told, by finish reason and usage. ``n_left``: choices whose client left a
    stream that had begun; ``n_unsure``: choices that the server may never have heard of.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.n_left = self.n_unsure = 0

    async def run(self, n: int, fates: Sequence[str]) -> dict[str, float]:
        """The server's counters behind it."""
        self._places = asyncio.Semaphore(AT_A_TIME)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            await asyncio.gather(*(self._one(client, i, self.rng.choice(fates)) for i in range(n)))
        return await calm(self.url)

    def _take(self, finish_reasons: Sequence[str], usage: dict) -> None:
        """What a whole answer says of itself."""
        self.told.update(finish_reasons)
        details = usage["completion_tokens_details"]
        self.told["choices"] += len(finish_reasons)
        self.told["prompt"] += usage["prompt_tokens"] * len(finish_reasons)  # the server evaluates it for each
        self.told["completion"] += usage["completion_tokens"]
        self.told["accepted"] += details["accepted_prediction_tokens"]
        self.told["rejected"] += details["rejected_prediction_tokens"]

    async def _one(self, client, i: int, fate: str) -> None:
        async with self._places:
            body = {
                "messages": [{"role": "user", "content": f"{i} " + "tell me more " * self.rng.randint(1, 60)}],
                "max_tokens": self.rng.randint(1, 24),
                "temperature": self.rng.choice([0, 0.8, 1.5]),
                "n": self.rng.choice([1, 1, 2]),
                "stop": self.rng.choice([None, ["tell me", " the "], ["e more", ", ", ".\n"]]),  # cut drafts too
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
                self._take([one["finish_reason"] for one in reply.json()["choices"]], reply.json()["usage"])
            elif fate == "leaves":
                with pytest.raises((httpx.TimeoutException, httpx.TransportError)):
                    await client.post(
                        route,
                        json={**body, "max_tokens": LONG, "ignore_eos": True, "stop": None},
                        timeout=self.rng.uniform(0.001, 0.3),
                    )
                self.n_unsure += body["n"]
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
        patience = 10**6
        if fate == "leaves stream":
            patience = self.rng.randint(0, 6)
            body.update({"max_tokens": LONG, "ignore_eos": True, "stop": None})
            self.n_left += body["n"]
        lines: list[str] = []
        async with client.stream("POST", route, json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                lines += [line] if line else []
                patience -= 1
                if patience < 0:
                    break
        if fate == "stream":
            assert lines.pop() == "data: [DONE]"
            *chunks, counts = [json.loads(line.removeprefix("data: ")) for line in lines]
            reasons = [part["finish_reason"] for chunk in chunks for part in chunk["choices"] if part["finish_reason"]]
            assert len(reasons) == body["n"]
            self._take(reasons, counts["usage"])
        self.seen[fate] += 1


async def calm(url: str) -> dict[str, float]:
    """The counters once nothing runs or waits, and nothing came of a last request for half a second."""
    n_same, n_before = 0, -1.0
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(int(CALM_S / 0.05)):
            found = samples((await client.get("/metrics")).text)
            n_ended = sum(finished(found).values())
            is_idle = found["specli_requests_running"] == found["specli_requests_waiting"] == 0
            n_same = n_same + 1 if is_idle and n_ended == n_before else 0
            if n_same == 10:
                return found
            n_before = n_ended
            await asyncio.sleep(0.05)
    raise AssertionError("something still runs")


def finished(counted: dict[str, float]) -> dict[str, float]:
    return {reason: counted[f'specli_requests_finished_total{{reason="{reason}"}}'] for reason in FINISHES}


def check_equal(counted: dict[str, float], told: Counter[str]) -> None:
    """What the server counted is what its clients did, none of whom left."""
    ended = finished(counted)
    assert told["choices"] == told["length"] + told["stop"] > 0
    assert (ended["length"], ended["eos"] + ended["stop"]) == (told["length"], told["stop"])
    assert ended["cancelled"] == counted["specli_requests_aborted_total"] == 0
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
        assert counted[f"specli_{name}_seconds_count"] == told["choices"], name
    assert counted["specli_prompt_tokens_total"] == told["prompt"]
    assert counted["specli_generation_tokens_total"] == told["completion"]
    n_judged = counted["specli_spec_decode_num_draft_tokens_total"]
    assert counted["specli_spec_decode_num_accepted_tokens_total"] == told["accepted"] > 0
    assert n_judged == told["accepted"] + told["rejected"]
    for name, total in (("accepted", told["accepted"]), ("draft", n_judged)):
        prefix = f"specli_spec_decode_num_{name}_tokens_per_pos_total"
        assert sum(value for sample, value in counted.items() if sample.startswith(prefix)) == total


def check_bounds(counted: dict[str, float], crowd: Crowd) -> None:
    """Where some left. Those who read on got every token; each choice of the others ended once, if it ever came."""
    ended, told = finished(counted), crowd.told
    n_sure = told["choices"] + crowd.n_left
    assert n_sure <= sum(ended.values()) <= n_sure + crowd.n_unsure
    assert sum(ended.values()) - ended["cancelled"] >= told["choices"]
    assert counted["specli_requests_aborted_total"] == ended["cancelled"] > 0, "nobody else was given up"
    assert counted["specli_e2e_request_latency_seconds_count"] == sum(ended.values()) - ended["cancelled"]
    n_spare = LONG * (crowd.n_left + crowd.n_unsure)
    assert told["completion"] <= counted["specli_generation_tokens_total"] <= told["completion"] + n_spare
    assert counted["specli_prompt_tokens_total"] >= told["prompt"]


def check_refusals(counted: dict[str, float], seen: Counter[str]) -> None:
    refused = {kind: counted[f'specli_requests_refused_total{{kind="{kind}"}}'] for kind in REFUSALS}
    expected = {"invalid": seen["no json"] + seen["no field"], "too_long": seen["too long"]}
    assert refused == {**dict.fromkeys(REFUSALS, 0), **expected}


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
        asyncio.run(crowd.run(N // 3, FATES))
        half_mib = rss_mib(process.pid)
        mixed = asyncio.run(crowd.run(N // 3, FATES))
        assert rss_mib(process.pid) < 1.1 * half_mib + 20, "memory does not grow with requests"
        check_bounds(mixed, crowd)
        told = crowd.told.copy()
        counted = asyncio.run(crowd.run(N - 2 * (N // 3), PATIENT))
        check_equal({name: value - mixed[name] for name, value in counted.items()}, crowd.told - told)
        check_refusals(counted, crowd.seen)
        assert sum(crowd.seen.values()) == N
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 5, "temperature": 0},
            timeout=60,
        )
        assert reply.json()["usage"]["completion_tokens"] == 5
