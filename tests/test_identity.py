"""Speculation changes no word: the default pair's real weights, every drafter, every K, against plain decoding.

Bit equality holds where the kernels make it so (DESIGN, section 5): CPU, flash attention, up to 256 tokens in all, or
q8_0 caches at any length. Elsewhere a token may only differ where plain decoding itself was undecided.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support import (
    GREEDY,
    Answer,
    CommandLine,
    decode,
    first_difference,
    forced_rows,
    generate,
    make_engine,
    settings,
)

from specli.chain import make_sampler
from specli.chat import Message
from specli.config import SamplingOptions
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.llama import LlamaEngine
from specli.sampling import Sampler
from specli.session import Session
from specli.verify import make_verifier

pytestmark = pytest.mark.model

KS = (1, 2, 4, 8, 16)
DRAFTERS = ("draft", "ngram")
EXACT_TOKENS = 256  # prompt and output, where passes of every width are the same to the bit
DEFAULTS = Sampler(temperature=0.8)

# (chat prompt, most tokens to generate). The repeating ones give n-gram drafting something to do.
PROMPTS = (
    ("Why is the sky blue?", EXACT_TOKENS),
    ("Write a short story about a fox who learns to read.", 96),
    ("Count from one to thirty, one number per line.", 40),
    ("Repeat this sentence five times: The quick brown fox jumps over the lazy dog.", 40),
    ("Write a Python function that returns the n-th Fibonacci number.", 40),
    ("List ten animals and the sound that each of them makes.", 40),
    ('Copy as JSON: name "Ada Lindqvist", city "Stavanger", quantity 24, price 18.40, item "probe".', 64),
    ("Translate into French: good morning, my friend, how are you today?", 40),
    ("What is 17 times 23? Explain each step.", 40),
    ("Write a poem about 日本 and a llama 🦙, with many emoji.", 40),
)


@dataclass(frozen=True)
class Pair:
    """The default pair with contexts to decode in; drafters are made anew for each answer."""

    session: Session
    engine: LlamaEngine
    draft: LlamaEngine

    def prompt(self, text: str) -> list[int]:
        return self.session.chat_ids([Message("user", text)])

    def answer(
        self, prompt, n, drafter="none", k=0, *, sampler=GREEDY, verify="block", seed=0, n_logprobs=None
    ) -> Answer:
        n = min(n, EXACT_TOKENS - len(prompt)) if n == EXACT_TOKENS else n
        return decode(
            self.engine,
            prompt,
            n,
            self.drafter(drafter, make_verifier(verify, sampler), sampler),
            k,
            sampler=sampler,
            verify=verify,
            seed=seed,
            n_logprobs=n_logprobs,
        )

    def drafter(self, name, verifier, sampler):
        end_ids = frozenset(self.session.model.end_ids) - frozenset(sampler.banned)
        if name == "draft":
            self.draft.rollback(0, 0)
            return ModelDrafter(self.draft, verifier, self.session.model.n_vocab, end_ids)
        return NgramDrafter(end_ids, sampler=verifier.sampler) if name == "ngram" else None


@pytest.fixture(scope="module")
def load_pair(q4_0_path, draft_model):
    """The pair with other options; contexts are made anew, weights are shared."""
    with ExitStack() as stack:
        options = {"n_ctx": 512, "flash_attn": "on"}
        session = stack.enter_context(Session(settings(q4_0_path, type="ngram", n_max=16, fixed=True, model=options)))

        def load(n_threads: int = 2, **more: object) -> Pair:
            chosen = {**options, "n_threads": n_threads, **more}
            engine = make_engine(session.model, max(KS) + 1, **chosen)
            stack.callback(engine.close)
            draft = make_engine(draft_model, 1, n_ctx=512, n_threads=n_threads)
            stack.callback(draft.close)
            return Pair(session, engine, draft)

        yield load


@pytest.fixture(scope="module")
def pair(load_pair) -> Pair:
    return load_pair()


@pytest.fixture(scope="module")
def endless(pair) -> Sampler:
    """Greedy, and never ending by itself."""
    return replace(GREEDY, banned=tuple(sorted(pair.session.model.end_ids)))


@pytest.fixture(scope="module")
def long_plain(pair, endless) -> Answer:
    """400 tokens of plain decoding."""
    return pair.answer(pair.prompt(PROMPTS[1][0]), 400, sampler=endless)


def assert_identical(plain: Answer, speculative: Answer, *what: object) -> None:
    assert speculative.tokens == plain.tokens, (what, first_difference(plain.tokens, speculative.tokens))
    assert speculative.text == plain.text, what
    assert speculative.reason == plain.reason, what


@pytest.mark.parametrize(("text", "n"), PROMPTS)
def test_greedy_is_identical_for_every_drafter_and_k(pair, text, n):
    prompt = pair.prompt(text)
    plain = pair.answer(prompt, n)
    assert plain.stats.proposed == 0
    assert len(plain.tokens) > 10
    for drafter in DRAFTERS:
        proposed = 0
        for k in KS:
            answer = pair.answer(prompt, n, drafter, k)
            assert_identical(plain, answer, drafter, k)
            assert len(answer.stats.per_position_acceptance) <= k
            proposed += answer.stats.proposed
        assert proposed > 0 or drafter == "ngram"  # prose may give an n-gram drafter nothing to say


def test_it_is_identical_with_one_thread(load_pair):
    pair = load_pair(n_threads=1)
    prompt = pair.prompt(PROMPTS[1][0])
    plain = pair.answer(prompt, EXACT_TOKENS)
    assert len(prompt) + len(plain.tokens) == EXACT_TOKENS
    for drafter, k in (("draft", 3), ("ngram", 7)):
        assert_identical(plain, pair.answer(prompt, EXACT_TOKENS, drafter, k), drafter, k)


def test_quantized_caches_keep_it_identical_at_400_tokens(load_pair, endless):
    pair = load_pair(cache_type_k="q8_0", cache_type_v="q8_0")
    prompt = pair.prompt(PROMPTS[1][0])
    plain = pair.answer(prompt, 400, sampler=endless)
    assert len(plain.tokens) == 400
    for drafter, k in (("draft", 3), ("draft", 8)):
        assert_identical(plain, pair.answer(prompt, 400, drafter, k, sampler=endless), drafter, k)


@pytest.mark.parametrize("text", [PROMPTS[1][0], PROMPTS[2][0]])
def test_a_seed_gives_one_text_for_every_drafter_and_k(pair, text):
    prompt, n = pair.prompt(text), 40
    plain = pair.answer(prompt, n, sampler=DEFAULTS, verify="coupled", seed=7)
    for drafter in DRAFTERS:
        for k in KS:
            answer = pair.answer(prompt, n, drafter, k, sampler=DEFAULTS, verify="coupled", seed=7)
            assert_identical(plain, answer, drafter, k)
    other = pair.answer(prompt, n, sampler=DEFAULTS, verify="coupled", seed=8)
    assert other.text != plain.text


@pytest.mark.parametrize("k", [3, 4])
def test_past_256_tokens_only_undecided_tokens_may_differ(pair, long_plain, endless, k):
    """f16 caches, and two threads, which split the attention of one-token passes but not of wider ones.

    At the first difference both paths saw the same tokens, so plain's margin between the two choices is at most what
    another width does to a difference of two logits; that is measured over the same text.
    """
    prompt, plain = pair.prompt(PROMPTS[1][0]), long_plain
    answer = pair.answer(prompt, 400, "draft", k, sampler=endless)
    at = first_difference(plain.tokens, answer.tokens)
    assert at is None or len(prompt) + at >= EXACT_TOKENS
    assert len(plain.tokens) == len(answer.tokens) == 400
    if at is None:
        return
    text = [*prompt, *plain.tokens[: at + 1]]
    narrow = forced_rows(pair.engine, text[:-1], 1, len(prompt) - 1)
    wide = forced_rows(pair.engine, text[:-1], k + 1, len(prompt) - 1)
    moved = wide - narrow
    largest = float((moved.max(axis=1) - moved.min(axis=1)).max())
    best = np.sort(narrow[-1])[-2:]
    assert narrow[-1].argmax() == plain.tokens[at]
    assert 0 < best[1] - best[0] <= largest


def test_a_target_drafts_for_itself_without_loading_twice(q4_0_path, monkeypatch):
    """Cases A4: nothing is ever rejected, or a cache is off by one."""
    loaded, contexts = [], []
    spy(monkeypatch, "LlamaModel", loaded)
    spy(monkeypatch, "LlamaEngine", contexts)
    options = settings(q4_0_path, q4_0_path, n_max=4, fixed=True, model={"n_ctx": 512, "flash_attn": "on"})
    with Session(options) as session:
        assert session.speculation.active
        assert len(loaded) == 1
        assert [engine.model for engine in contexts] == [loaded[0], loaded[0]]
        prompt = session.chat_ids([Message("user", PROMPTS[1][0])])
        answer = generate(session, prompt, EXACT_TOKENS - len(prompt))
        assert answer.stats.acceptance_rate == 1.0
        assert answer.stats.per_position_acceptance == [1.0] * 4
        assert answer.stats.block_efficiency > 4
        assert answer.tokens == generate(session, prompt, EXACT_TOKENS - len(prompt), speculate=False).tokens


def spy(monkeypatch, name: str, made: list) -> None:
    """Keep what is made of a class of the engine."""
    import specli.engine.llama

    class Spy(getattr(specli.engine.llama, name)):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(specli.engine.llama, name, Spy)


@pytest.mark.parametrize("verify", ["block", "rejection", "coupled"])
@pytest.mark.parametrize("sampler", [Sampler(1.0, top_k=0, top_p=1.0, min_p=0.0), Sampler(1.0)], ids=["all", "chain"])
def test_a_target_accepts_all_of_its_own_samples(pair, verify, sampler):
    """q equals p to the bit, so no coin can reject."""
    own = make_engine(pair.session.model, 1, n_ctx=512, flash_attn="on", n_threads=2)
    try:
        prompt = pair.prompt(PROMPTS[1][0])
        answer = replace(pair, draft=own).answer(prompt, 60, "draft", 4, sampler=sampler, verify=verify, seed=3)
    finally:
        own.close()
    assert answer.stats.proposed >= 12
    assert answer.stats.acceptance_rate == 1.0


def test_a_seed_repeats_a_session_and_none_does_not(q4_0_path, draft_path):
    """--seed makes coupled the default; without one, block draws coins of its own."""
    options = settings(q4_0_path, draft_path, fixed=True, sampling=SamplingOptions(seed=7), model={"n_ctx": 512})
    with Session(options) as session:
        assert (session.seed, session.speculation.verify) == (7, "coupled")
        prompt = session.chat_ids([Message("user", PROMPTS[1][0])])
        first, second = (generate(session, prompt, 48) for _ in range(2))
        assert first.tokens == second.tokens
        assert first.tokens == generate(session, prompt, 48, speculate=False).tokens
        assert first.stats.accepted == second.stats.accepted  # cases J11
    unseeded = replace(options, sampling=SamplingOptions())
    with Session(unseeded) as session:
        assert (session.seed, session.speculation.verify) == (None, "block")
        first, second = (generate(session, prompt, 48) for _ in range(2))
        assert first.tokens != second.tokens


def test_prompts_are_fed_alike_on_both_paths(q4_0_path, draft_path, monkeypatch):
    """Cases A3: the same chunks, the last prompt token included, or the first token may flip."""
    with Session(settings(q4_0_path, draft_path, model={"n_ctx": 512, "n_ubatch": 32})) as session:
        prompt = session.text_ids("One two three four five six seven eight nine ten. " * 8)
        assert len(prompt) > 64
        fed = {}
        for speculate in (False, True):
            batches = []
            original = session.engine.evaluate

            def record(slices, interruptible=False, batches=batches, original=original):
                batches.extend((part.start, len(part.tokens)) for part in slices)
                return original(slices, interruptible)

            monkeypatch.setattr(session.engine, "evaluate", record)
            generate(session, prompt, 4, speculate=speculate)
            monkeypatch.undo()
            fed[speculate] = [batch for batch in batches if batch[0] < len(prompt)]
    assert fed[True] == fed[False]
    assert fed[True][-1][0] + fed[True][-1][1] == len(prompt)


@pytest.mark.parametrize("sampling", [("--temp", "0"), ("--temp", "0.8", "-s", "7")], ids=["greedy", "seed"])
def test_the_command_line_prints_the_same_bytes(specli: CommandLine, q4_0_path, sampling):
    common = ("run", *sampling, "-fa", "on", "-n", "60", "-p", PROMPTS[1][0])
    outputs = {}
    for name, flags in {
        "plain": ("--spec-type", "none"),
        "controlled": (),
        "draft 3": ("--draft-fixed",),
        "draft 8": ("--draft-fixed", "--spec-draft-n-max", "8"),
        "ngram 7": ("--draft-fixed", "--spec-type", "ngram", "--spec-draft-n-max", "7"),
    }.items():
        run = specli(*common, *flags)
        assert (run.code, run.err) == (0, ""), name
        outputs[name] = run.out
    assert set(outputs.values()) == {outputs["plain"]}
    assert len(outputs["plain"]) > 100
    figures = specli(*common, "--draft-fixed", "--stats-json", "-")
    told = json.loads(figures.out)
    assert told["text"].encode() == outputs["plain"]
    assert told["speculating"] is True
    assert 0 < told["accepted"] <= told["proposed"]


def test_a_seed_repeats_its_text_in_five_runs_under_the_controller(
    specli: CommandLine, q4_0_path, draft_path, tmp_path
):
    """The first two measure, the others go by what was kept; beside one that drafts whether it pays or not."""
    command = ("run", "-m", q4_0_path, "-md", draft_path, "-s", "7", "-fa", "on", "-n", "60", "-p", PROMPTS[1][0])
    runs = []
    for more in ((), (), (), (), (), ("--draft-fixed",)):
        run = specli(*command, "--stats-json", "-", *more, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert (run.code, run.err) == (0, "")
        runs.append(json.loads(run.out))
    assert {run["verify"] for run in runs} == {"coupled"}
    assert runs[0]["controller"]["calibration_passes"] > 0 == runs[4]["controller"]["calibration_passes"]
    assert runs[5]["proposed"] > 0
    assert len({tuple(run["tokens"]) for run in runs}) == 1


CHAINS: dict[str, dict[str, object]] = {
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "top-n-sigma": {"top_n_sigma": 1.5},
    "typical": {"typical_p": 0.7},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0},
    "bias": {"bias": {28: 3.0, 198: -2.0}},
    "another order": {"repeat_penalty": 1.3, "samplers": ("top_k", "penalties", "temperature", "min_p")},
    "grammar": {"grammar": 'root ::= line+\nline ::= [A-Z] [a-z ]+ "." "\\n"'},
    "schema": {
        "json_schema": '{"type": "object", "properties": {"colour": {"type": "string"}, "why": {"type": "string"}}}'
    },
}


def chain_of(pair: Pair, name: str, temperature: float) -> Sampler:
    options = dict(CHAINS[name])
    bias = options.pop("bias", {})
    return replace(make_sampler(SamplingOptions(temperature, **options), pair.session.model), bias=bias)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", CHAINS)
def test_every_sampler_gives_plain_decodings_text(pair, name, temperature):
    """Cases H1, H3, H5, H6, H7: greedy, and with a seed, whatever drafts."""
    sampler, prompt = chain_of(pair, name, temperature), pair.prompt(PROMPTS[1][0])
    how = {"sampler": sampler, "verify": "coupled", "seed": 5}
    plain = pair.answer(prompt, 40, **how)
    for drafter, k in (("draft", 4), ("ngram", 8)):
        assert_identical(plain, pair.answer(prompt, 40, drafter, k, **how), name, drafter, k)
    if temperature == 0 and name in ("bias", "grammar", "schema"):
        assert plain.tokens != pair.answer(prompt, 40).tokens  # it is in use


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_bias_reaches_every_position(pair, drafter):
    """Cases H5, H6."""
    prompt = pair.prompt(PROMPTS[0][0])
    second = pair.answer(prompt, 8).tokens[1]
    banned = pair.answer(prompt, 64, drafter, 4, sampler=replace(GREEDY, bias={second: -100.0}))
    assert second not in banned.tokens
    one = pair.answer(prompt, 24, drafter, 4, sampler=replace(GREEDY, bias={28: 100.0}))
    assert set(one.tokens) == {28}


@pytest.mark.parametrize("verify", ["block", "rejection", "coupled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_schema_is_kept_at_temperature_1(pair, drafter, verify):
    """Cases H8: a nullable field; rejected proposals do not advance the grammar."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": ["integer", "null"], "maximum": 99},
        },
        "required": ["name", "age"],
    }
    sampler = make_sampler(SamplingOptions(1.0, json_schema=json.dumps(schema)), pair.session.model)
    prompt, accepted = pair.prompt("Invent a person, as JSON."), 0
    for seed in range(5):
        answer = pair.answer(prompt, 150, drafter, 4, sampler=sampler, verify=verify, seed=seed)
        assert answer.reason == "eos"
        person = json.loads(answer.text)
        assert set(person) == {"name", "age"}
        assert person["age"] is None or isinstance(person["age"], int)
        accepted += answer.stats.accepted
    assert accepted > 0 or drafter == "ngram"


def test_logprobs_are_plain_decodings(pair):
    """Cases M11, M12: one per token, at most 0, the same with and without a draft; those of a row add up to 1."""
    prompt, answers = pair.prompt(PROMPTS[4][0]), {}
    for drafter, k in (("none", 0), ("draft", 4), ("ngram", 4)):
        answers[drafter] = pair.answer(prompt, 40, drafter, k, n_logprobs=3)
    plain = answers["none"].stats.logprobs
    for answer in answers.values():
        found = answer.stats.logprobs
        assert [entry.token for entry in found] == list(answer.tokens)
        for entry, same in zip(found, plain, strict=True):
            assert entry.logprob <= 0
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-3)
            assert [token for token, _ in entry.top] == [token for token, _ in same.top]
            assert entry.top[0] == (entry.token, entry.logprob)  # greedy
    everything = pair.answer(prompt, 3, "draft", 4, n_logprobs=100).stats.logprobs
    assert all(0.5 < sum(np.exp(logprob) for _token, logprob in entry.top) <= 1 + 1e-9 for entry in everything)
