"""The engine's thread of a server over the shipped numpy engine: queue, slots, rounds, failures, departures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from specli.controller import Controller
from specli.drafters.adaptive import AdaptiveDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.table import LogitsFunction, TableEngine, random_logits
from specli.errors import DeadEnd, EngineError, QueueFull, SpecError, TimedOut, Unavailable
from specli.events import Event, Failed, Finished, PrefillDone, RoundDone, Text
from specli.sampling import Sampler
from specli.serve.job import Job
from specli.serve.metrics import Metrics
from specli.serve.pace import Pace, Sla
from specli.serve.scheduler import Scheduler
from specli.stats import Stats
from specli.verify import make_verifier

V, WAIT_S = 12, 60.0
LOGITS = random_logits(V, 1)
GREEDY = make_verifier("greedy", Sampler(temperature=0, top_k=0, top_p=1, min_p=0))


class Client:
    """Collects what a job delivers. ``on_event`` runs in the engine's thread, while it is between two passes."""

    def __init__(
        self, prompt: Sequence[int], on_event: Callable[[Event], None] = lambda _event: None, **options
    ) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self._on_event = on_event
        now_s = time.perf_counter()
        values = {
            "prompt": list(prompt),
            "verifier": GREEDY,
            "seed": None,
            "max_tokens": 8,
            "stops": (),
            "end_ids": frozenset(),
            "n_logprobs": None,
            "reuse": True,
            "arrived_s": now_s,
            "deadline_s": now_s + 1000,
            "deliver": self.take,
        }
        self.job = Job(**{**values, **options})

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.append(event)
            self._on_event(event)
            if isinstance(event, Finished | Failed):
                self.ended.set()

    def wait(self) -> Client:
        assert self.ended.wait(WAIT_S)
        return self

    @property
    def error(self) -> SpecError:
        found = [event.error for event in self.events if isinstance(event, Failed)]
        assert len(found) == 1
        return found[0]

    @property
    def tokens(self) -> tuple[int, ...]:
        (finished,) = [event for event in self.events if isinstance(event, Finished)]
        return finished.tokens

    @property
    def n_tokens(self) -> int:
        """How far it came, whatever ended it."""
        stats = Stats(self.job.slot or 0)
        for event in self.events:
            stats.observe(event)
        return stats.n_tokens

    @property
    def n_reused(self) -> int:
        return next(event.n_reused for event in self.events if isinstance(event, PrefillDone))


def lose_draft(_sequences, _budgets):
    raise EngineError("the draft's device was lost")


@pytest.fixture
def server():
    """A started scheduler: ``server(n_slots=2)``; ``.engine`` is its engine."""
    made: list[Scheduler] = []

    def make(
        n_slots: int = 2,
        n_queue: int = 8,
        engine: TableEngine | None = None,
        pace: Pace | None = None,
        start=True,
        exact=False,
        fixed=False,
        draft_fails=False,
        **options,
    ) -> Scheduler:
        engine = engine or TableEngine(LOGITS, V, n_sequences=n_slots, **{"n_ctx": 200, **options})
        ngram = NgramDrafter(min_hit_rate=0.2)
        controller = None if fixed else Controller(4)
        drafter = ngram if controller is None else AdaptiveDrafter(controller, None, ngram)
        if draft_fails:
            drafter.propose = lose_draft
        session = SimpleNamespace(
            engine=engine,
            drafter=drafter,
            verifier=GREEDY,
            controller=controller,
            model=SimpleNamespace(piece=lambda token: bytes([65 + token]), bos=-1),
            speculation=SimpleNamespace(k=4, drafter="draft tiny or n-gram" if draft_fails else "n-gram"),
            settings=SimpleNamespace(exact=exact),
        )
        scheduler = Scheduler(session, Metrics(4, n_slots), pace or Pace(), n_queue)
        scheduler.engine = engine
        made.append(scheduler)
        if start:
            scheduler.start()
        return scheduler

    yield make
    for scheduler in made:
        if scheduler._thread.is_alive():
            scheduler.stop(now=True)


def ask(scheduler: Scheduler, *clients: Client) -> None:
    for client in clients:
        scheduler.submit([client.job])


def solo(prompt: Sequence[int], n: int = 8, logits: LogitsFunction = LOGITS) -> tuple[int, ...]:
    """Plain greedy decoding."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(logits(tokens).argmax()))
    return tuple(tokens[len(prompt) :])


def value(scheduler: Scheduler, name: str) -> float:
    """One sample of what /metrics says."""
    lines = scheduler.exposition().decode().splitlines()
    (found,) = [line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")]
    return float(found)


def test_more_requests_than_slots_each_get_what_they_get_alone(server):
    scheduler = server(n_slots=3, n_queue=50)
    prompts = [[i % V, 3 * i % V, 5, i // 3] for i in range(20)]
    clients = [Client(prompt, max_tokens=5 + i) for i, prompt in enumerate(prompts)]
    ask(scheduler, *clients)
    for i, (client, prompt) in enumerate(zip(clients, prompts, strict=True)):
        assert client.wait().tokens == solo(prompt, 5 + i)
    assert value(scheduler, 'specli_requests_finished_total{reason="length"}') == 20
    assert value(scheduler, "specli_generation_tokens_total") == sum(5 + i for i in range(20))
    assert value(scheduler, "specli_prompt_tokens_total") == 80
    assert value(scheduler, "specli_requests_running") == value(scheduler, "specli_requests_waiting") == 0


def test_sequences_share_passes(server):
    """Continuous batching: two answers of 30 tokens take far fewer rounds than 60."""
    scheduler = server(n_slots=2, start=False)
    first, second = Client([1, 2], max_tokens=30), Client([3, 4], max_tokens=30)
    ask(scheduler, first, second)
    scheduler.start()
    first.wait(), second.wait()
    rounds = [event for event in first.events if isinstance(event, RoundDone)]
    assert sum(len(event.sequences) == 2 for event in rounds) >= 10
    assert first.tokens == solo([1, 2], 30)
    assert second.tokens == solo([3, 4], 30)


def test_the_text_is_delivered_as_it_comes(server):
    scheduler = server()
    client = Client([1, 2, 3], max_tokens=6)
    ask(scheduler, client)
    client.wait()
    text = "".join(event.text for event in client.events if isinstance(event, Text))
    assert text == "".join(chr(65 + token) for token in solo([1, 2, 3], 6))
    assert isinstance(client.events[0], PrefillDone)


def test_a_prompt_that_goes_on_is_evaluated_from_where_it_differs(server):
    scheduler = server(n_slots=2)
    first = Client([1, 2, 3, 4])
    ask(scheduler, first)
    answer = first.wait().tokens
    other = Client([9, 9])
    ask(scheduler, other)
    other.wait()
    again = Client([1, 2, 3, 4, *answer, 7])
    ask(scheduler, again)
    assert again.wait().n_reused == 4 + len(answer) - 1  # an answer's last token was never evaluated
    assert again.tokens == solo([1, 2, 3, 4, *answer, 7])
    assert value(scheduler, "specli_prompt_tokens_cached_total") == again.n_reused


def test_without_reuse_everything_is_evaluated(server):
    scheduler = server(n_slots=1)
    for _ in range(2):
        client = Client([1, 2, 3, 4], reuse=False)
        ask(scheduler, client)
        assert client.wait().n_reused == 0


def test_a_full_queue_refuses_and_says_when_to_come_back(server):
    scheduler = server(n_slots=1, n_queue=2, start=False)
    clients = [Client([i]) for i in range(3)]  # one for the slot, two that wait
    ask(scheduler, *clients)
    with pytest.raises(QueueFull, match="3 requests are waiting already") as found:
        scheduler.submit([Client([9]).job])
    assert 1 <= found.value.retry_after_s <= 600
    assert str(QueueFull(1, 2)) == "1 request is waiting already; try again in 2 s"
    scheduler.start()
    for client in clients:
        client.wait()
    late = Client([9])
    ask(scheduler, late)
    assert late.wait().tokens == solo([9])


def test_jobs_of_one_request_are_queued_together_or_not_at_all(server):
    scheduler = server(n_slots=1, n_queue=2, start=False)
    with pytest.raises(QueueFull):
        scheduler.submit([Client([i]).job for i in range(4)])
    assert scheduler.n_waiting == 0


def test_a_client_that_leaves_frees_its_slot_and_touches_nobody(server):
    scheduler = server(n_slots=2)

    def leave(event: Event) -> None:
        if isinstance(event, Text):
            gone.job.cancel()

    gone, stays = Client([1, 2], leave, max_tokens=150), Client([3, 4], max_tokens=40)
    ask(scheduler, gone, stays)
    assert stays.wait().tokens == solo([3, 4], 40)
    n_given = len(gone.wait().tokens)
    assert 1 <= n_given <= 11, "a round more than what it had when it left"
    assert value(scheduler, "specli_requests_aborted_total") == 1


def test_queued_clients_that_leave_are_never_begun(server):
    scheduler = server(n_slots=1, start=False)
    gone = [Client([i]) for i in range(5)]
    last = Client([9])
    ask(scheduler, *gone, last)
    for client in gone:
        client.job.cancel()
    scheduler.start()
    assert last.wait().tokens == solo([9])
    assert not any(client.events for client in gone)
    assert value(scheduler, "specli_requests_aborted_total") == 5
    assert value(scheduler, "specli_prompt_tokens_total") == 1


def test_what_its_own_request_gave_up_counts_as_no_departure(server):
    """One of ``n`` choices failed, and the others are not wanted: one is under way, one waits."""
    pace = Pace(Sla(ttft_ms=1e-9))
    scheduler = server(n_slots=1, pace=pace, start=False)

    def give_up(event: Event) -> None:
        if isinstance(event, Text):
            for client in clients:
                client.job.cancel(has_left=False)

    clients = [Client([1, 2], give_up, max_tokens=150), Client([3, 4])]
    ask(scheduler, *clients, last := Client([5]))
    scheduler.start()
    last.wait()
    assert value(scheduler, 'specli_requests_finished_total{reason="cancelled"}') == 2
    assert value(scheduler, "specli_requests_aborted_total") == 0
    assert value(scheduler, "specli_time_to_first_token_seconds_count") == 1
    assert len(pace._ttft._values) == 1


def test_who_has_left_stays_so():
    job = Client([1]).job
    job.cancel(has_left=False)
    job.cancel()
    assert job.is_cancelled
    assert not job.has_left


def test_the_log_says_when_a_bound_is_broken_and_kept(server, caplog):
    pace = Pace(Sla(ttft_ms=100))
    scheduler = server(pace=pace, start=False)
    said = []
    for now_s, ttft_s in ((1.0, 9.0), (100.0, None), (101.0, 0.01), (200.0, 9.0), (300.0, 0.01)):
        if ttft_s is not None:
            pace.observe_answer(now_s, ttft_s, None)
        scheduler._clock = lambda now_s=now_s: now_s
        caplog.clear()
        scheduler._look_at_sla()
        said.append(caplog.text.partition("the bound on ")[2].strip())
    assert said == [
        "TTFT is broken: p95 9000 ms, asked 100 ms",
        "TTFT was broken; no answer of the last minute tells more",
        "",
        "TTFT is broken: p95 9000 ms, asked 100 ms",
        "TTFT is kept again: p95 10 ms, asked 100 ms",
    ]


def test_a_bound_that_a_short_burst_broke_is_logged_before_the_rest(server, caplog):
    scheduler = server(pace=Pace(Sla(ttft_ms=1e-9)), start=False)
    scheduler._sla_checked_s = time.perf_counter() + 1000
    ask(scheduler, client := Client([1, 2]))
    scheduler.start()
    client.wait()
    scheduler.stop()
    assert "the bound on TTFT is broken" in caplog.text


def test_a_client_that_leaves_during_its_prompt_stops_at_the_next_batch(server):
    class Watched(TableEngine):
        def evaluate(self, slices, interruptible=False):
            if slices[0].sequence == 0 and slices[0].start == 16:
                gone.job.cancel()
            return super().evaluate(slices, interruptible)

    engine = Watched(LOGITS, V, n_ctx=200, n_batch=16, n_sequences=2)
    scheduler = server(engine=engine, start=False)
    gone = Client([i % V for i in range(160)])
    ask(scheduler, gone)
    scheduler.start()
    gone.wait()
    assert gone.tokens == ()
    assert max(start for start, _length in engine.batches) == 16


def test_a_job_that_was_not_finished_in_time_fails_alone(server, caplog):
    scheduler = server(n_slots=2)
    late = Client([1, 2], deadline_s=time.perf_counter(), max_tokens=100)
    fine = Client([3, 4], max_tokens=20)
    ask(scheduler, late, fine)
    assert isinstance(late.wait().error, TimedOut)
    assert fine.wait().tokens == solo([3, 4], 20)
    assert value(scheduler, 'specli_requests_refused_total{kind="timeout"}') == 1
    assert said(caplog) == [("WARNING", f"an answer failed: {late.error}")]


def test_an_answer_that_runs_out_of_time_is_in_the_log(server, caplog):
    late = Client([1, 2], lambda event: setattr(late.job, "deadline_s", 0.0), max_tokens=100)
    ask(scheduler := server(), late)
    assert isinstance(late.wait().error, TimedOut)
    assert late.n_tokens > 0
    assert said(caplog) == [("WARNING", "an answer failed: the answer was not finished in time")]
    scheduler.stop()


def said(caplog) -> list[tuple[str, str]]:
    """Levels and lines of the log."""
    return [(record.levelname, record.getMessage()) for record in caplog.records]


class Broken:
    """A verifier that fails from the third token on."""

    name, is_sampled, sampler = "broken", False, GREEDY.sampler

    def choose(self, row, sequence, drafted, state):
        return GREEDY.choose(row, sequence, drafted, state)

    def verify(self, draft, rows, sequence):
        if len(sequence.tokens) > 4:
            raise DeadEnd("the grammar allows no token")
        return GREEDY.verify(draft, rows, sequence)


def test_an_answer_that_fails_takes_nobody_down(server, caplog):
    scheduler = server(n_slots=2, start=False)
    broken, fine = Client([1, 2], verifier=Broken(), max_tokens=50), Client([3, 4], max_tokens=50)
    ask(scheduler, broken, fine)
    scheduler.start()
    assert isinstance(broken.wait().error, DeadEnd)
    assert fine.wait().tokens == solo([3, 4], 50)
    assert value(scheduler, 'specli_requests_refused_total{kind="invalid"}') == 1, "nothing of the engine's"
    assert value(scheduler, 'specli_requests_refused_total{kind="engine"}') == 0
    assert said(caplog) == []
    again = Client([1, 2])
    ask(scheduler, again)
    assert again.wait().tokens == solo([1, 2])


class Fragile(TableEngine):
    """Fails by a script: a pass for a prompt (p) or of a round (r), that the next of its kind works (-) or not (x)."""

    script = ""

    def evaluate(self, slices, interruptible=False):
        kind, fate = self.script[:2] or "--"
        if kind == "pr"[not interruptible]:
            self.script = self.script[2:]
            if fate == "x":
                raise EngineError(f"the device was lost, {slices[0].tokens[0]}")
        return super().evaluate(slices, interruptible)


def fragile(script: str) -> Fragile:
    engine = Fragile(LOGITS, V, n_ctx=200, n_sequences=2)
    engine.script = script
    return engine


def test_a_failed_pass_fails_its_answers_and_the_next_ones_are_answered(server, caplog):
    scheduler = server(engine=fragile("rx"), start=False)
    clients = [Client([1, 2]), Client([3, 4])]
    ask(scheduler, *clients)
    scheduler.start()
    for client in clients:
        client.wait()
    failed = [client for client in clients if isinstance(client.events[-1], Failed)]
    assert said(caplog) == [("ERROR", f"an answer failed: {client.error}") for client in failed]
    assert failed
    again = Client([1, 2])
    ask(scheduler, again)
    assert again.wait().tokens == solo([1, 2])
    assert scheduler.failure is None


LASTING = ("pxpxpxpx", "rxrxrxrx", "pxpxp-pxpxpxpx", "rxp-rxp-rxrx", "pxpxpxp-pxpxpxpx")


@pytest.mark.parametrize(
    "script", [*LASTING, "pxpxpxp-", "rxrxrxr-", "pxpxp-pxpxp-", "rxrxr-rxrxr-", "pxrxp-rxp-r-", "pxpxrxrxp-r-"]
)
def test_three_passes_of_a_kind_and_one_to_prove_it_are_a_failure_for_good(server, caplog, script):
    """One of its kind that works between them says that the engine does, as does the one behind them."""
    scheduler, is_lasting = server(engine=fragile(script)), script in LASTING
    errors = []
    while scheduler.engine.script and scheduler.failure is None:
        ask(scheduler, client := Client([len(errors) % V]))
        client.wait()
        errors += [client.error] if isinstance(client.events[-1], Failed) else []
        if len(errors) > 2:
            scheduler._thread.join(0.2)  # the proof comes behind the answer
    assert len(errors) == script.count("x") - is_lasting, "the proof is nobody's"
    scheduler._thread.join(WAIT_S if is_lasting else 0.0)
    assert value(scheduler, "specli_engine_failed") == is_lasting
    assert [line for level, line in said(caplog) if level == "ERROR" and "for good" in line] == (
        [f"the engine has failed for good: {errors[-1]}; restart the server"] if is_lasting else []
    )
    if is_lasting:
        with pytest.raises(Unavailable, match="the engine has failed: the device was lost"):
            scheduler.submit([Client([1]).job])
    else:
        ask(scheduler, client := Client([1, 2]))
        assert client.wait().tokens == solo([1, 2])


class Picky(TableEngine):
    """Finds no numbers for what begins with one of ``bad``, nor in rounds with ``is_round_bad``."""

    bad: Sequence[int] = ()
    is_round_bad = False
    n_passes = 0

    def evaluate(self, slices, interruptible=False):
        self.n_passes += 1
        found = super().evaluate(slices, interruptible)
        for part, rows in zip(slices, found.rows, strict=True):
            if self._history[part.sequence][0] in self.bad and (interruptible or self.is_round_bad):
                rows[:] = np.nan
        return found


def picky(*bad: int, n_slots: int = 4) -> Picky:
    engine = Picky(LOGITS, V, n_ctx=200, n_sequences=n_slots)
    engine.bad = bad
    return engine


def test_a_prompt_that_fails_takes_no_server_down_however_often_it_is_asked(server, caplog):
    scheduler = server(engine=picky(5), start=False)
    fine = Client([1, 2], max_tokens=100)
    clients = [Client([5, 1]) for _ in range(12)]
    scheduler._n_queue = 50
    ask(scheduler, fine)
    for i in range(0, 12, 3):  # n: 3, four times
        scheduler.submit([client.job for client in clients[i : i + 3]])
    scheduler.start()
    for client in clients:
        assert isinstance(client.wait().error, EngineError)
    assert fine.wait().tokens == solo([1, 2], 100)
    ask(scheduler, last := Client([1, 2]))
    assert last.wait().tokens == solo([1, 2])
    assert scheduler.failure is None
    assert ("WARNING", "passes for 3 requests failed one after the other, but the engine works") in said(caplog)


def test_choices_of_one_request_prove_nothing(server, caplog):
    scheduler = server(engine=fragile("px" * 6), start=False)
    clients = [Client([3]) for _ in range(6)]
    scheduler.submit([client.job for client in clients])
    scheduler.start()
    for client in clients:
        client.wait()
    ask(scheduler, last := Client([1, 2]))
    assert last.wait().tokens == solo([1, 2])
    assert not [line for _level, line in said(caplog) if "one after the other" in line]


def test_a_turn_ends_with_the_first_prompt_that_fails(server):
    """Those who have an answer under way get their round before the next one may fail."""
    scheduler = server(engine=(engine := picky(5)), start=False)
    ask(scheduler, fine := Client([1], max_tokens=50))
    scheduler._take_turn()
    ask(scheduler, *(clients := [Client([5, i]) for i in range(3)]))
    n_before = engine.n_passes
    scheduler._take_turn()
    assert engine.n_passes == n_before + 2
    assert sum(bool(client.events) for client in clients) == 1
    scheduler.start()
    assert fine.wait().tokens == solo([1], 50)


def test_a_dead_engine_is_told_after_three_requests(server):
    scheduler = server(engine=fragile("px" * 100))
    for _ in range(3):  # the same prompt, as a probe asks
        ask(scheduler, client := Client([1]))
        assert isinstance(client.wait().error, EngineError)
    scheduler._thread.join(WAIT_S)
    with pytest.raises(Unavailable):
        scheduler.submit([Client([1]).job])


@pytest.mark.parametrize("is_draft", [False, True])
def test_rounds_that_always_fail_are_told_though_prompts_work(server, is_draft):
    """A pass of the target shows nothing of a draft model: three requests do."""
    scheduler = server(engine=fragile("" if is_draft else "rx" * 100), draft_fails=is_draft)
    for i in range(3):
        ask(scheduler, client := Client([i]))
        assert isinstance(client.wait().error, EngineError)
        assert client.n_tokens == 1, "the prompt's"
    scheduler._thread.join(WAIT_S)
    assert scheduler.failure == str(client.error)


def test_one_question_that_its_client_repeats_condemns_no_draft_model(server):
    scheduler = server(draft_fails=True)
    for _ in range(5):
        ask(scheduler, client := Client([1]))
        client.wait()
    scheduler.stop()
    assert scheduler.failure is None


def test_numbers_of_rounds_that_mean_nothing_take_no_server_down_where_others_work(server):
    engine = picky(*range(5, 9))
    engine.is_round_bad = True
    clean = engine.evaluate
    engine.evaluate = lambda slices, interruptible=False: (
        TableEngine.evaluate(engine, slices, True) if interruptible else clean(slices)
    )
    scheduler = server(engine=engine)
    for i in range(5, 9):
        ask(scheduler, client := Client([i]))
        assert isinstance(client.wait().error, EngineError)
    ask(scheduler, last := Client([1, 2]))
    assert last.wait().tokens == solo([1, 2])


def test_sums_hold_behind_a_failure_for_good(server):
    """Answers under way count as far as they came."""
    scheduler = server(engine=picky(5, 0), start=False)  # 0 is what proves it
    ask(scheduler, *(under_way := [Client([i], max_tokens=150) for i in (1, 2)]))
    for _ in range(5):
        scheduler._take_turn()
    assert scheduler.failure is None
    ask(scheduler, *(clients := [Client([5]) for _ in range(3)]))
    scheduler.start()
    for client in (*clients, *under_way):
        assert isinstance(client.wait().error, EngineError)
    scheduler._thread.join(WAIT_S)
    assert scheduler.failure is not None
    told = []
    for client in under_way:
        told.append(stats := Stats(client.job.slot))
        for event in client.events:
            stats.observe(event)
    assert value(scheduler, "specli_generation_tokens_total") == sum(stats.n_tokens for stats in told) > 10
    assert value(scheduler, "specli_prompt_tokens_total") == 2
    assert value(scheduler, "specli_spec_decode_num_draft_tokens_total") == sum(stats.proposed for stats in told)
    n_rounds = sum(stats.rounds for stats in told)
    n_emitted = sum(stats.n_tokens - 1 for stats in told)
    assert value(scheduler, "specli_spec_decode_block_efficiency") == pytest.approx(n_emitted / n_rounds)


def test_a_round_that_fails_counts_once_whatever_the_number_of_its_answers(server):
    scheduler = server(n_slots=5, engine=(engine := TableEngine(LOGITS, V, n_ctx=200, n_sequences=5)), start=False)
    whole, n_left = engine.evaluate, [1]

    def evaluate(slices, interruptible=False):
        if len(slices) == 5 and n_left.pop():
            raise EngineError("the device was lost")
        return whole(slices, interruptible)

    engine.evaluate = evaluate
    clients = [Client([i], max_tokens=150) for i in range(5)]
    ask(scheduler, *clients, last := Client([7]))
    scheduler.start()
    assert last.wait().tokens == solo([7])
    assert sum(isinstance(client.events[-1], Failed) for client in clients) == 5
    assert scheduler.failure is None


def test_numbers_that_mean_nothing_in_every_row_are_a_failure_for_good(server):
    class Lost(TableEngine):
        def evaluate(self, slices, interruptible=False):
            found = super().evaluate(slices, interruptible)
            for rows in found.rows:
                rows[:] = np.nan
            return found

    scheduler = server(engine=Lost(lambda tokens: LOGITS(tokens).copy(), V, n_ctx=200, n_sequences=2))
    for i in range(3):
        ask(scheduler, client := Client([i]))
        assert isinstance(client.wait().error, EngineError)
    scheduler._thread.join(WAIT_S)
    assert scheduler.failure == str(client.error)


def repeating(tokens: Sequence[int]) -> np.ndarray:
    """A text that repeats itself, but for every ninth token."""
    row = np.zeros(V, np.float32)
    row[len(tokens) * 7 % V if len(tokens) % 9 == 0 else len(tokens) % 4] = 10.0
    return row


def test_what_a_stop_string_cuts_off_is_not_in_the_counters(server):
    """Sums over all answers, by position too, are those of their usage, though drafted tokens were taken back."""
    engine = TableEngine(repeating, V, n_ctx=200, n_sequences=2)
    scheduler = server(n_queue=1000, engine=engine, fixed=True, start=False)
    clients = []
    for i in range(60):
        text = "".join(chr(65 + token) for token in solo([i % V], 60, repeating))
        at = 20 + i % 30
        stops = (text[at : at + 1 + i % 7], "never", text[at : at + 2] + "!")
        clients.append(Client([i % V], max_tokens=60, stops=stops))
    ask(scheduler, *clients)
    scheduler.start()
    told, n_judged = [], 0
    for client in clients:
        stats = Stats(client.wait().job.slot)
        for event in client.events:
            if isinstance(event, Finished):
                n_judged += stats.proposed
            stats.observe(event)
        told.append(stats)
    scheduler.stop()
    assert n_judged > sum(stats.proposed for stats in told), "some were taken back"
    for name, expected in (
        ("num_draft_tokens", sum(stats.proposed for stats in told)),
        ("num_accepted_tokens", sum(stats.accepted for stats in told)),
    ):
        assert value(scheduler, f"specli_spec_decode_{name}_total") == expected > 0
        positions = [f'specli_spec_decode_{name}_per_pos_total{{position="{i}"}}' for i in range(4)]
        assert sum(value(scheduler, position) for position in positions) == expected
    n_emitted = value(scheduler, "specli_generation_tokens_total") - sum(stats.first_at_s is not None for stats in told)
    n_rounds = sum(stats.rounds for stats in told)
    assert value(scheduler, "specli_spec_decode_block_efficiency") == pytest.approx(n_emitted / n_rounds)


def test_rounds_are_counted_while_an_answer_goes_on(server):
    """Those alone wait that a stop string may still take back."""
    scheduler = server(n_slots=1)
    seen = []

    def look(event: Event) -> None:
        if isinstance(event, RoundDone):
            seen.append(value(scheduler, "specli_spec_decode_block_efficiency"))

    ask(scheduler, client := Client([1, 2], look, max_tokens=40, stops=("never",)))
    client.wait()
    assert seen[-1] >= 1


def test_a_fault_of_ours_is_told_to_everybody_and_to_those_who_come_later(server):
    class Wrong(TableEngine):
        def evaluate(self, slices, interruptible=False):
            raise ZeroDivisionError("a fault")

    scheduler = server(engine=Wrong(LOGITS, V, n_ctx=200, n_sequences=1), start=False)
    clients = [Client([1]), Client([2])]
    ask(scheduler, *clients)
    scheduler.start()
    for client in clients:
        assert "ZeroDivisionError: a fault" in str(client.wait().error)
    with pytest.raises(Unavailable, match="ZeroDivisionError: a fault; restart the server"):
        scheduler.submit([Client([3]).job])


def test_stopping_finishes_what_was_accepted(server):
    scheduler = server(n_slots=1, start=False)
    clients = [Client([i], max_tokens=20) for i in range(4)]
    ask(scheduler, *clients)
    scheduler.start()
    scheduler.stop()
    for i, client in enumerate(clients):
        assert client.tokens == solo([i], 20)
    with pytest.raises(Unavailable, match="the server is stopping"):
        scheduler.submit([Client([1]).job])


def test_stopping_at_once_tells_those_who_wait(server):
    scheduler = server(n_slots=1, start=False)
    clients = [Client([i], max_tokens=150) for i in range(4)]
    ask(scheduler, *clients)
    scheduler._is_killed = True
    scheduler.start()
    scheduler.stop(now=True)
    for client in clients:
        assert client.wait().events
    assert isinstance(clients[3].error, Unavailable)


def test_prompts_take_turns_with_answers(server):
    """While one answer is under way, a long prompt goes on in chunks, with rounds between them."""
    engine = TableEngine(LOGITS, V, n_ctx=400, n_batch=128, n_sequences=2, pass_s=lambda n: 0.001 * n)
    pace = Pace()
    pace.observe_chunk(100, 1.0)
    pace.observe_round(1, 1, 0.1, 0.0)
    scheduler = server(engine=engine, pace=pace, start=False)
    quick, long = Client([1], max_tokens=60), Client([i % V for i in range(300)], max_tokens=2)
    ask(scheduler, quick, long)
    scheduler.start()
    assert quick.wait().tokens == solo([1], 60)
    assert long.wait().tokens == solo([i % V for i in range(300)], 2)
    chunks = [length for _start, length in engine.batches if length > 8]
    assert len(chunks) >= 3
    assert max(chunks) < 128


def test_exact_prompts_are_cut_where_they_are_cut_alone(server):
    """Two that come together share a turn, never a batch."""
    engine = TableEngine(LOGITS, V, n_ctx=400, n_batch=64, n_sequences=2)
    scheduler = server(engine=engine, start=False, exact=True)
    clients = [Client([i % V for i in range(40)]), Client([i % 7 for i in range(100)])]
    ask(scheduler, *clients)
    scheduler.start()
    for client in clients:
        client.wait()
    assert [part for part in engine.batches if part[1] > 8] == [(0, 40), (0, 64), (64, 36)]


def test_a_cancelled_prompt_claims_no_more_than_is_evaluated(server):
    """A slot that was promised 160 tokens and holds 32 is worth less than one that holds 100."""

    class Watched(TableEngine):
        def evaluate(self, slices, interruptible=False):
            if slices[0].start == 16 and slices[0].sequence == 1:
                gone.job.cancel()
            return super().evaluate(slices, interruptible)

    engine = Watched(LOGITS, V, n_ctx=300, n_batch=16, n_sequences=2)
    scheduler = server(engine=engine)
    text = [int(token) for token in np.random.default_rng(0).integers(0, V, 200)]
    ask(scheduler, kept := Client(text[:100], max_tokens=1))
    kept.wait()
    gone = Client([text[0] + 1 & 7, *text[1:160]], reuse=False)
    ask(scheduler, gone)
    gone.wait()
    ask(scheduler, again := Client(text[:120]))
    assert again.wait().n_reused >= 100


def test_random_arrivals_departures_and_failures_leave_nothing_behind(server):
    """200 requests; a third leave at a random moment, some come with a verifier that fails: all counters add up."""
    rng = np.random.default_rng(5)
    scheduler = server(n_slots=3, n_queue=1000)
    clients: list[Client] = []
    for _ in range(200):
        fate = rng.random()
        n = int(rng.integers(1, 30))
        prompt = rng.integers(0, V, n).tolist()
        client = Client(
            prompt,
            max_tokens=int(rng.integers(0, 20)),
            verifier=Broken() if fate < 0.1 else GREEDY,
            reuse=bool(rng.random() < 0.8),
        )
        client.prompt, client.leaves = prompt, fate > 0.7
        clients.append(client)
        ask(scheduler, client)
        if client.leaves and rng.random() < 0.5:
            client.job.cancel()
            scheduler.wake()
    for client in clients:
        if client.leaves:
            client.job.cancel()
    scheduler.wake()
    for client in clients:
        if not client.leaves:
            client.wait()
            if client.job.verifier is GREEDY:
                assert client.tokens == solo(client.prompt, client.job.max_tokens)
    scheduler.stop()
    assert scheduler.n_running == scheduler.n_waiting == 0
    finished = sum(
        value(scheduler, f'specli_requests_finished_total{{reason="{reason}"}}')
        for reason in ("eos", "stop", "length", "cancelled")
    )
    assert finished + value(scheduler, 'specli_requests_refused_total{kind="invalid"}') == 200
    assert value(scheduler, "specli_generation_tokens_total") == sum(client.n_tokens for client in clients)
