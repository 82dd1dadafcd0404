"""Many answers at a time say what each says alone: to the bit under ``--exact``, else within what widths differ by."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import takewhile

import pytest
from serving import answer, serving
from support import never

from specli import bits
from specli.bench.workloads import built_in
from specli.chat import Message
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.engine.llama import LlamaEngine
from specli.exact import Proof
from specli.session import Session
from specli.stats import Stats

N = 32  # tokens


def together(session: Session, prompts, n: int = N, **options):
    """All at once."""
    with serving(session) as scheduler:
        answers = [answer(session, prompt, n, **options) for prompt in prompts]
        scheduler.submit([one.job for one in answers])
        return [one.wait() for one in answers]


def alone(session: Session, prompts, n: int = N, **options):
    """One after the other, nothing drafted."""
    found = []
    for prompt in prompts:
        with serving(session, speculate=False) as scheduler:
            found.append(answer(session, prompt, n, **options))
            scheduler.submit([found[-1].job])
            found[-1].wait()
    return found


@pytest.mark.model
def test_eight_greedy_clients_get_each_what_it_gets_alone(q4_0_path, draft_path):
    """Or part where the two best tokens are closer than the logits moved before: batched passes use other kernels."""
    options = ModelOptions(q4_0_path, n_ctx=1024, n_threads=1, n_sequences=8)
    settings = Settings(options, ModelOptions(draft_path), SamplingOptions(temperature=0))
    with Session(settings) as session:
        texts = [prompt.text for name in ("chat", "extract", "story", "rewrite") for prompt in built_in((name,))[:2]]
        prompts = [session.chat_ids([Message("user", text)]) for text in texts]
        solo, many = (ask(session, prompts, n_logprobs=2) for ask in (alone, together))
        for one, other in zip(solo, many, strict=True):
            assert len(one.stats.tokens) == len(other.stats.tokens) == N
            pairs = list(zip(one.stats.logprobs, other.stats.logprobs, strict=True))
            same = list(takewhile(lambda pair: pair[0].token == pair[1].token, pairs))
            if len(same) == N:
                assert one.text == other.text
                continue
            moved = max(abs(a.logprob - b.logprob) for a, b in same)
            (_, best), (_, second) = pairs[len(same)][0].top
            assert best - second <= 2 * moved, f"token {len(same)}: margin {best - second}, moved {moved}"


@pytest.mark.model
def test_identical_clients_get_the_same_text_and_acceptance(q4_0_path, draft_path):
    """M13: acceptance does not collapse as sequences run together."""
    options = ModelOptions(q4_0_path, n_ctx=512, n_threads=1, n_sequences=8)
    speculation = SpeculationOptions("draft", 3, fixed=True)
    settings = Settings(options, ModelOptions(draft_path), SamplingOptions(temperature=0), speculation)
    with Session(settings) as session:
        prompt = session.chat_ids([Message("user", "List the days of the week.")])
        found = {(one.text, one.stats.acceptance_rate) for n in (1, 2, 4, 8) for one in together(session, [prompt] * n)}
        assert len(found) == 1
        assert found.pop()[1] > 0.2


PROOF = Proof({"flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 17, 1.0, (16,))


@pytest.fixture(scope="module")
def exact_session(q4_0_path, draft_path):
    """The settings that ``exact.settle`` finds for this file, without the minutes that the proof takes."""
    options = ModelOptions(q4_0_path, n_ctx=640, n_threads=2, n_sequences=4)
    settings = Settings(options, ModelOptions(draft_path), SamplingOptions(temperature=0), exact=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specli.exact.settle", lambda *_arguments: PROOF)
        with Session(settings) as session:
            assert not session.target_options.kv_unified
            assert session.engine.n_rows_max == 17
            yield session


@pytest.mark.model
def test_passes_that_hold_several_texts_give_each_its_own_logits(target_model):
    options = PROOF.apply(ModelOptions(target_model.options.path, n_ctx=64, n_threads=2, kv_unified=False))
    tokens = bits.sample_tokens(lambda text: target_model.tokenize(text, False, False), 60)
    with (
        closing(LlamaEngine(target_model, options, 17, never)) as one,
        closing(LlamaEngine(target_model, replace(options, n_sequences=4), 17, never)) as shared,
    ):
        for width in (4, 8, 16):
            assert bits.together(one, shared, tokens, 40, width) == bits.NONE
            assert [shared.n_past(sequence) for sequence in range(4)] == [0, 0, 0, 0]


@pytest.mark.model
@pytest.mark.parametrize("sampling", [SamplingOptions(temperature=0), SamplingOptions(temperature=1, seed=7)])
def test_exact_answers_are_identical_whoever_else_is_answered(exact_session, sampling):
    prompts = [exact_session.text_ids(f"{i} once upon a time there was " * (1 + 9 * i)) for i in range(5)]
    solo = alone(exact_session, prompts, N, sampling=sampling)
    many = together(exact_session, prompts, N, sampling=sampling)
    for one, other in zip(solo, many, strict=True):
        assert one.stats.tokens == other.stats.tokens
    options = replace(exact_session.target_options, n_sequences=1)
    with Session(Settings(options, sampling=sampling)) as run:
        for prompt, other in zip(prompts, many, strict=True):
            stats = Stats()
            for event in run.generate(prompt, GenerationOptions(N)):
                stats.observe(event)
            tokens = other.stats.tokens
            n = next((i + 1 for i, token in enumerate(tokens) if token in run.end_ids), len(tokens))
            assert stats.tokens == tokens[:n], "and so does specli run, which ends at EOS"


@pytest.mark.model
def test_a_seed_repeats_a_text_alone_and_beside_others(exact_session):
    """H15: five calls at temperature 2."""
    prompt = exact_session.text_ids("say something")
    hot = SamplingOptions(temperature=2, seed=42)
    texts = {alone(exact_session, [prompt], sampling=hot)[0].text for _ in range(2)}
    for _ in range(3):
        with serving(exact_session) as scheduler:
            mine = answer(exact_session, prompt, N, hot)
            others = [answer(exact_session, prompt, N, SamplingOptions(temperature=1)) for _ in range(3)]
            scheduler.submit([one.job for one in (*others, mine)])
            texts.add(mine.wait().text)
            for one in others:
                one.wait()
    assert len(texts) == 1
