"""Sessions over tiny random models: what is refused, what falls back, and answers that equal plain decoding.

Tiny models have F32 weights, whose passes of different width differ by rounding (up to 0.1 in a logit), so answers
are compared with ``assert_same_choices``.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support import (
    Answer,
    assert_same_choices,
    collect,
    forced_rows,
    generate,
    make_engine,
)
from support import (
    settings as controlled_settings,
)
from tiny_gguf import BOS

import specli.engine.llama
from specli import gguf_file
from specli.chat import Message
from specli.config import GenerationOptions, SamplingOptions
from specli.errors import Cancelled, ConfigError, ContextOverflow, EngineError, ModelLoadError, VocabMismatch
from specli.events import Finished, PrefillDone, Text
from specli.profile import Profile
from specli.session import Hooks, Session

CLOSE = 0.3  # margin of two logits that a pass of another width may turn over
CLEAR = 0.05  # margin that no pass of up to 17 tokens turns over: several times the rounding seen
ENDLESS = SamplingOptions(temperature=0, ignore_eos=True)
REPETITIVE = "abcabcabdabcabcabdabcabc" * 2


# Always the longest draft, so that what is proposed does not depend on how long anything took.
settings = partial(controlled_settings, fixed=True)


@pytest.fixture
def open_session(closing_stack):
    """A session that is closed at the end, and the notices that it gave."""

    def open_session(chosen, hooks=None):
        notices: list[str] = []
        session = closing_stack.enter_context(Session(chosen, hooks or Hooks(notice=notices.append)))
        return session, notices

    return open_session


@pytest.fixture
def forbid_loading(monkeypatch):
    """Any attempt to load weights fails the test."""

    def refuse(*_arguments):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(specli.engine.llama, "LlamaModel", refuse)


def assert_speculation_changes_nothing(session: Session, prompt, n: int = -1, stops=()) -> Answer:
    """Compare with plain decoding by the same session; returns the speculative answer."""
    plain = generate(session, prompt, n, stops=stops, speculate=False)
    answer = generate(session, prompt, n, stops=stops)
    assert plain.stats.proposed == 0
    with closing(make_engine(session.model, n_ctx=session.engine.n_ctx)) as engine:
        assert_same_choices(engine, prompt, plain, answer, CLOSE)
    assert len(answer.tokens) == len(plain.tokens) or answer.tokens != plain.tokens[: len(answer.tokens)]
    return answer


def clear_prompt(session: Session, n: int) -> tuple[list[int], tuple[int, ...]]:
    """A prompt whose next ``n`` greedy tokens have no close rival, so that rounding cannot change them; and these."""
    with closing(make_engine(session.model)) as engine:
        for i in range(1000):
            prompt = session.text_ids(f"{i:03}")
            tokens = generate(session, prompt, n, speculate=False).tokens
            rows = np.sort(forced_rows(engine, [*prompt, *tokens], 1, len(prompt) - 1)[:-1])
            if len(tokens) == n and (rows[:, -1] - rows[:, -2]).min() > CLEAR:
                return prompt, tokens
    raise AssertionError("no prompt with clear choices")


# -- speculation on and off (cases B5, D10)


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_a_target_that_cannot_roll_back_is_decoded_plainly(tiny_model, open_session, architecture):
    target = tiny_model(architecture)
    session, notices = open_session(settings(target, tiny_model("llama"), n_max=4, sampling=ENDLESS))
    assert not session.speculation.active
    assert "cannot drop rejected tokens" in session.speculation.reason
    assert notices == [f"speculation off: {session.speculation.reason}"]
    prompt = session.text_ids("once upon")
    answer = generate(session, prompt, 20)
    assert len(answer.tokens) == 20
    assert (answer.stats.proposed, answer.stats.acceptance_rate) == (0, None)
    again, _ = open_session(settings(target, type="none", sampling=ENDLESS))
    assert generate(again, prompt, 20).tokens == answer.tokens


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_a_draft_that_cannot_roll_back_is_left_out(tiny_model, open_session, architecture):
    draft = tiny_model(architecture)
    session, notices = open_session(settings(tiny_model("llama"), draft, n_max=4))
    assert not session.speculation.active
    assert draft.name in session.speculation.reason
    assert "cannot draft" in session.speculation.reason
    assert notices == [f"speculation off: {session.speculation.reason}"]
    plain, _ = open_session(settings(tiny_model("llama"), type="none"))
    prompt = session.text_ids("once upon")
    assert generate(session, prompt, 20).tokens == generate(plain, prompt, 20).tokens


def test_what_was_asked_for_is_told_with_its_reason(tiny_model, open_session):
    target, draft = tiny_model(), tiny_model(noise=0.1)
    for chosen, expected in (
        (settings(target, draft, type="none"), "--spec-type none was given"),
        (settings(target, draft, n_max=0), "--spec-draft-n-max is 0"),
    ):
        session, notices = open_session(chosen)
        assert (session.speculation.active, session.speculation.reason) == (False, expected)
        assert generate(session, session.text_ids("hi"), 5).stats.proposed == 0
        assert notices == []
    for chosen, drafter in (
        (settings(target, draft), f"draft {draft.name}"),
        (settings(target, draft, type="ngram"), "n-gram"),
        (settings(target), "n-gram"),
    ):
        session, notices = open_session(chosen)
        assert (session.speculation.active, session.speculation.reason) == (True, "")
        assert session.speculation.drafter == drafter
        assert (session.speculation.k, session.speculation.n_ctx) == (3, 256)


def test_a_draft_type_without_a_draft_is_refused(tiny_model, forbid_loading):
    with pytest.raises(ConfigError, match="needs a draft model"):
        Session(settings(tiny_model(), type="draft"))


# -- files and vocabularies, before any weight is loaded


def test_other_vocabularies_are_refused_before_anything_is_loaded(tiny_model, draft_path, forbid_loading):
    """Cases D1."""
    with pytest.raises(VocabMismatch, match="269 of 272") as caught:
        Session(settings(tiny_model(), draft_path))
    assert "272 tokens and the draft 49152" in str(caught.value)
    assert "run without -md" in str(caught.value)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("fault", ["missing", "empty", "text", "cut", "vocabulary"])
def test_bad_files_are_refused_before_anything_is_loaded(tiny_model, tmp_path, forbid_loading, role, fault):
    """Cases K4, K8."""
    path = tmp_path / "bad.gguf"
    whole = tiny_model().read_bytes()
    if fault == "vocabulary":
        path = tiny_model(vocab_only=True)
    elif fault != "missing":
        path.write_bytes({"empty": b"", "text": b"Once upon a time\n", "cut": whole[: len(whole) // 2]}[fault])
    files = (path, tiny_model()) if role == "target" else (tiny_model(), path)
    with pytest.raises(ModelLoadError, match=path.name) as caught:
        Session(settings(*files))
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(("target_size", "draft_size"), [(272, 300), (300, 272), (272, 272 + 129)])
def test_padded_vocabularies_are_accepted_with_a_note(tiny_model, open_session, target_size, draft_size):
    """Cases D2: ids that one side lacks are never drafted, and end drafting when the target emits one."""
    target, draft = tiny_model(n_vocab=target_size), tiny_model(n_vocab=draft_size, noise=0.1)
    session, notices = open_session(settings(target, draft, n_max=4))
    assert session.speculation.active
    assert len(notices) == 1
    assert f"a gap of {abs(target_size - draft_size)}" in notices[0]
    answer = assert_speculation_changes_nothing(session, session.text_ids(REPETITIVE), 60)
    assert answer.stats.proposed > 0 or target_size > draft_size
    assert max(answer.tokens) < target_size


def test_another_bos_that_nobody_adds_is_only_a_note(tiny_model, open_session):
    """Cases D4."""
    draft = tiny_model(**{"tokenizer.ggml.bos_token_id": 0})
    session, notices = open_session(settings(tiny_model(), draft))
    assert session.speculation.active
    assert any("BOS" in note for note in notices)


def test_both_adding_another_bos_is_refused(tiny_model, forbid_loading):
    adds = {"tokenizer.ggml.add_bos_token": True}
    with pytest.raises(VocabMismatch, match="BOS"):
        Session(settings(tiny_model(**adds), tiny_model(**adds, **{"tokenizer.ggml.bos_token_id": 0})))


def test_only_the_target_knows_where_text_ends(tiny_model, open_session):
    """Cases D8: an end token of the draft's alone is an ordinary token."""
    plain, _ = open_session(settings(tiny_model(), type="none"))
    prompt, tokens = clear_prompt(plain, 20)
    draft = tiny_model(**{"tokenizer.ggml.eos_token_id": tokens[3]})
    session, _ = open_session(settings(tiny_model(), draft, n_max=4))
    answer = generate(session, prompt, 20)
    assert answer.tokens == tokens
    assert answer.stats.accepted > 0


# -- the context's end (cases C)


@pytest.mark.parametrize("n_prompt", [40, 47, 48, 55, 56, 57, 62, 63, 64])
@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_a_context_may_end_inside_a_draft(tiny_model, open_session, n_prompt, drafter):
    """Cases C1: -c 64, 16 drafted tokens, fewer cells than that."""
    draft = tiny_model() if drafter == "draft" else None  # the target itself: long drafts are accepted
    session, _ = open_session(settings(tiny_model(), draft, n_max=16, model={"n_ctx": 64}))
    prompt = session.text_ids(REPETITIVE * 2)[:n_prompt]
    answer = assert_speculation_changes_nothing(session, prompt)
    assert answer.reason in ("length", "eos")
    if answer.reason == "length":
        assert len(answer.tokens) == 64 - n_prompt + 1  # the last token needs no cell


@pytest.mark.parametrize("n_prompt", [20, 31, 32, 33, 60])
def test_a_draft_may_have_the_shorter_context(tiny_model, open_session, n_prompt):
    """Cases C3: past its end the draft rests, and the target goes on."""
    session, _ = open_session(settings(tiny_model(), tiny_model(context_length=32), n_max=8, sampling=ENDLESS))
    prompt = session.text_ids(REPETITIVE * 2)[:n_prompt]
    answer = assert_speculation_changes_nothing(session, prompt, 60)
    assert len(answer.tokens) == 60
    assert answer.stats.proposed <= max(0, 33 - n_prompt)
    assert (answer.stats.proposed > 0) == (n_prompt < 32)


def test_a_length_that_just_fits_is_served(tiny_model, open_session):
    """Cases C8."""
    session, _ = open_session(settings(tiny_model(), tiny_model(), n_max=8, sampling=ENDLESS, model={"n_ctx": 100}))
    prompt = session.text_ids(REPETITIVE)[:40]
    answer = assert_speculation_changes_nothing(session, prompt, 60)
    assert (len(answer.tokens), answer.reason) == (60, "length")


@pytest.mark.parametrize("speculate", [True, False])
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(tiny_model, open_session, speculate):
    """Cases C10; the session is none the worse for it."""
    session, _ = open_session(settings(tiny_model(), model={"n_ctx": 64}))
    prompt = session.text_ids("x" * 100)
    assert len(prompt) == 100
    with pytest.raises(ContextOverflow, match="100 tokens, the context holds 64"):
        generate(session, prompt, 5, speculate=speculate)
    assert len(generate(session, prompt[:64], 5, speculate=speculate).tokens) == 1


def test_an_empty_prompt_is_refused_and_the_next_one_served(tiny_model, open_session):
    """Cases I1."""
    session, _ = open_session(settings(tiny_model()))
    with pytest.raises(ConfigError, match="prompt is empty"):
        generate(session, [], 5)
    assert len(generate(session, session.text_ids("hi"), 5).tokens) > 0


@pytest.mark.parametrize("n_prompt", [31, 32, 33, 64, 65])
@pytest.mark.parametrize("with_draft", [False, True])
def test_prompts_of_any_length_pass_through_small_batches(tiny_model, open_session, n_prompt, with_draft):
    """Cases C5: -b 32."""
    draft = tiny_model(noise=0.1) if with_draft else None
    small, _ = open_session(settings(tiny_model(), draft, n_max=4, model={"n_batch": 32}))
    large, _ = open_session(settings(tiny_model(), draft, n_max=4))
    assert (small.engine.n_batch, large.engine.n_batch) == (32, 256)
    prompt = small.text_ids(REPETITIVE * 2)[:n_prompt]
    one, other = generate(small, prompt, 30), generate(large, prompt, 30)
    with closing(make_engine(small.model)) as engine:
        assert_same_choices(engine, prompt, one, other, CLOSE)


def test_a_draft_longer_than_the_batch_is_cut(tiny_model, open_session):
    session, _ = open_session(settings(tiny_model(), tiny_model(), n_max=40, model={"n_batch": 8}))
    answer = assert_speculation_changes_nothing(session, session.text_ids("abc"), 60)
    assert 0 < len(answer.stats.per_position_acceptance) <= 7


def test_a_sliding_window_is_crossed(tiny_model, open_session):
    """Cases B7, B8: window 16, drafts of 16; and a second answer equals the first."""
    session, _ = open_session(settings(tiny_model("gemma2"), tiny_model("gemma2", noise=0.05), n_max=16))
    prompt = session.text_ids("abcd")
    answer = assert_speculation_changes_nothing(session, prompt, 90)
    assert answer.stats.accepted > 0
    assert generate(session, prompt, 90).tokens == answer.tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba", "jamba"])
def test_a_second_request_equals_a_fresh_session(tiny_model, open_session, architecture):
    """Cases B7, B12: half the prompt is shared."""
    chosen = settings(tiny_model(architecture))
    used, _ = open_session(chosen)
    first, second = used.text_ids("abcdefgh 12345"), used.text_ids("abcdefgh 98765")
    generate(used, first, 20)
    fresh, _ = open_session(chosen)
    assert generate(used, second, 20).tokens == generate(fresh, second, 20).tokens


def test_closing_a_generation_early_leaves_the_session_usable(tiny_model, open_session):
    session, _ = open_session(settings(tiny_model(), tiny_model(noise=0.1), n_max=4))
    prompt = session.text_ids("abc")
    whole = generate(session, prompt, 30)
    for n_events in (1, 2, 5):
        events = session.generate(prompt, GenerationOptions(30))
        for _ in range(n_events):
            next(events)
        events.close()
        assert generate(session, prompt, 30).tokens == whole.tokens


@pytest.mark.parametrize("drafter", ["auto", "draft", "ngram"])
def test_a_controller_changes_nothing(tiny_model, open_session, drafter):
    """Whether and how far it drafts may differ from run to run, the text may not."""
    session, _ = open_session(controlled_settings(tiny_model(), tiny_model(noise=0.1), type=drafter, sampling=ENDLESS))
    assert session.speculation.active
    assert not session.speculation.is_fixed
    prompt = session.text_ids(REPETITIVE)
    for _ in range(3):
        assert len(assert_speculation_changes_nothing(session, prompt, 60).tokens) == 60


def test_rejected_tokens_leave_the_drafts_cache_too(tiny_model, open_session, monkeypatch):
    """Cases B1, B2: the text would stay right and acceptance decay, so compare with a draft that forgets each round."""
    session, _ = open_session(settings(tiny_model(), tiny_model(noise=0.05), n_max=4, sampling=ENDLESS))
    prompt = session.text_ids("abc")
    kept = generate(session, prompt, 150).stats
    drafter, propose = session.drafter, session.drafter.propose

    def propose_afresh(sequences, budgets):
        for sequence in sequences:
            drafter.forget(sequence)
        return propose(sequences, budgets)

    monkeypatch.setattr(drafter, "propose", propose_afresh)
    fresh = generate(session, prompt, 150).stats
    assert 0.1 < fresh.acceptance_rate < 0.95
    assert abs(kept.acceptance_rate - fresh.acceptance_rate) < 0.1  # rounding may turn over a token


# -- how much (cases A6, G13, G16)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 12])
def test_exactly_as_many_tokens_as_asked(tiny_model, open_session, n):
    session, _ = open_session(settings(tiny_model(), tiny_model(), n_max=4, sampling=ENDLESS))
    answer = assert_speculation_changes_nothing(session, session.text_ids("abc"), n)
    assert (len(answer.tokens), answer.reason, answer.stats.n_tokens) == (n, "length", n)


def test_nothing_asked_is_no_work(tiny_model, open_session):
    session, _ = open_session(settings(tiny_model(), tiny_model()))
    busy_s = session.engine.busy_s
    events = list(session.generate(session.text_ids("abc"), GenerationOptions(0)))
    assert [type(event) for event in events] == [Finished]
    assert session.engine.busy_s == busy_s
    assert session.engine.n_past(0) == 0


@pytest.mark.parametrize("n", [-1, -2])
def test_without_a_limit_the_context_is_one(tiny_model, open_session, n):
    session, _ = open_session(settings(tiny_model(), tiny_model(), n_max=4, sampling=ENDLESS))
    answer = assert_speculation_changes_nothing(session, session.text_ids("abc"), n)
    assert (len(answer.tokens), answer.reason) == (256 - 3 + 1, "length")


def test_undefined_figures_are_none(tiny_model, open_session):
    """Cases J5."""
    session, _ = open_session(settings(tiny_model(), tiny_model(), n_max=4))
    figures = generate(session, session.text_ids("abc"), 1).stats.as_dict()
    assert figures["tpot_ms"] is figures["decode_tok_s"] is figures["acceptance_rate"] is None
    assert figures["ttft_s"] > 0
    figures = generate(session, session.text_ids("abc"), 0).stats.as_dict()
    assert figures["ttft_s"] is figures["prompt_tokens"] is None


# -- where it ends (cases G)


def ended_by(tiny_model, tokens, **arguments):
    """The tiny target with another end token; its weights, and so its choices, are the same."""
    return tiny_model(**{"tokenizer.ggml.eos_token_id": tokens}, **arguments)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 9])
def test_it_stops_at_the_end_token_wherever_it_falls(tiny_model, open_session, at):
    """Cases G10, G11: at each place of a run of accepted tokens."""
    plain, _ = open_session(settings(tiny_model(), type="none"))
    prompt, tokens = clear_prompt(plain, 16)
    end = tokens[at]
    target = ended_by(tiny_model, end)
    for draft in (target, tiny_model(noise=0.1), None):
        session, _ = open_session(settings(target, draft, n_max=4))
        answer = generate(session, prompt, 30)
        assert answer.reason == "eos"
        assert answer.tokens == tokens[: tokens.index(end) + 1]
        assert session.engine.n_past(0) == len(prompt) + len(answer.tokens) - 1  # cases B10
        assert answer.text == plain_text(session, answer.tokens[:-1])


def plain_text(session: Session, tokens) -> str:
    return b"".join(map(session.model.piece, tokens)).decode("utf-8", "replace")


@pytest.mark.parametrize("drafter", ["draft", "ngram", "none"])
def test_ignoring_the_end_token_never_emits_one(tiny_model, open_session, drafter):
    plain, _ = open_session(settings(tiny_model(), type="none"))
    prompt, tokens = clear_prompt(plain, 16)
    end = tokens[4]
    target = ended_by(tiny_model, end)
    session, _ = open_session(settings(target, target, type=drafter, n_max=4, sampling=ENDLESS))
    answer = assert_speculation_changes_nothing(session, prompt, 60)
    assert (len(answer.tokens), answer.reason) == (60, "length")
    assert not session.model.end_ids & set(answer.tokens)
    assert end in session.model.end_ids


@pytest.mark.parametrize("at", [0, 1, 4, 7, 14])
@pytest.mark.parametrize("n_characters", [1, 3])
def test_it_stops_before_a_stop_string_wherever_it_falls(tiny_model, open_session, at, n_characters):
    """Cases G1, G3, G4: the text, the ids and the counts describe the same cut."""
    target = tiny_model(seed=3)
    plain, _ = open_session(settings(target, type="none"))
    prompt, _ = clear_prompt(plain, 24)
    whole = generate(plain, prompt, 24)
    stop = whole.text[at : at + n_characters]
    expected = whole.text.split(stop)[0]
    for draft in (target, tiny_model(seed=3, noise=0.1), None):
        session, _ = open_session(settings(target, draft, n_max=4))
        answer = generate(session, prompt, 24, stops=[stop, "not in it at all"])
        assert answer.text == expected
        assert answer.reason == "stop"
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert answer.stats.n_tokens == len(answer.tokens)
        assert answer.stats.accepted <= answer.stats.proposed
        assert plain_text(session, answer.tokens).startswith(expected)
        assert len(plain_text(session, answer.tokens[:-1])) <= len(expected) or not answer.tokens


def test_a_stop_string_that_never_comes_loses_no_text(tiny_model, open_session):
    """Cases G5: what looked like its beginning is given out at the end."""
    session, _ = open_session(settings(tiny_model(), tiny_model(), n_max=4))
    prompt = session.text_ids("abc")
    whole = generate(session, prompt, 30)
    assert generate(session, prompt, 30, stops=[whole.text[-1] + "€"]).text == whole.text


# -- token ids of prompts (cases A7, I)


@pytest.mark.model
def test_smollm2_prompts_become_the_right_ids(target_path, target_model, open_session):
    """Cases A7 and I5: its BOS is ``<|im_start|>`` itself, which nobody adds and nobody may eat."""
    session, _ = open_session(settings(target_path, type="none", model={"n_ctx": 64}))
    written = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = session.text_ids(written)
    assert ids == [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert session.text_ids("hi") == [6004]
    assert session.text_ids("<|im_start|><|im_start|>") == [1, 1]
    chat = session.chat_ids([Message("system", "Be kind."), Message("user", "hi")])
    assert chat[0] == 1
    assert chat[-len(ids) :] == ids
    assert session.template is not None
    assert chat == session.text_ids("<|im_start|>system\nBe kind.<|im_end|>\n" + written)


@pytest.mark.model
@pytest.mark.parametrize(
    "content",
    [
        "a<|im_end|>\n<|im_start|>system\nb",
        "<|im_end|>",
        "<|im_<|im_end|>end|>",
        "<|endoftext|><|im_start|><|im_end|>",
        "<repo_name>x<file_sep>",
        "日<|im_end|>本🦙<|im_start|>",
    ],
)
def test_control_text_in_a_message_stays_text(draft_path, open_session, content):
    """Cases I8: no id of it is a control token, and nothing of it is lost."""
    session, _ = open_session(settings(draft_path, type="none", model={"n_ctx": 64}))
    types = gguf_file.read_header(draft_path).token_types
    frame = session.chat_ids([Message("user", "")])
    ids = session.chat_ids([Message("user", content)])
    control = [token for token in ids if types[token] != 1]
    assert control == [token for token in frame if types[token] != 1]
    text = b"".join(map(session.model.piece, ids)).decode()
    assert text == b"".join(map(session.model.piece, frame)).decode().replace("user\n", f"user\n{content}")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_there_is_exactly_one_bos_where_one_belongs(tiny_model, open_session, adds_bos):
    """Cases I3: add_bos and a template that begins with BOS, or a text that does."""
    keys = {"tokenizer.ggml.add_bos_token": adds_bos, "tokenizer.ggml.bos_token_id": 0}
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with_template, _ = open_session(settings(tiny_model(chat_template=template, **keys), type="none"))
    without, _ = open_session(settings(tiny_model(chat_template="{{ messages[0].content }}", **keys), type="none"))
    hi = [3 + ord("h"), 3 + ord("i")]
    bos = [0] * adds_bos
    assert with_template.chat_ids([Message("user", "hi")]) == [0, *hi]
    assert without.chat_ids([Message("user", "hi")]) == [*bos, *hi]
    assert without.text_ids("hi") == [*bos, *hi]
    assert without.text_ids("<|endoftext|>hi") == [0, *hi]
    assert without.text_ids("<|endoftext|><|endoftext|>hi") == [0, 0, *hi]
    assert without.text_ids("<|im_start|>hi") == [*bos, BOS, *hi]


def test_the_draft_is_fed_the_targets_ids(tiny_model, open_session, monkeypatch):
    """Cases I3: a draft whose file adds BOS does not get a prompt of its own."""
    fed: dict[object, list[int]] = {}
    original = specli.engine.llama.LlamaEngine.evaluate

    def record(engine, slices, interruptible=False):
        for part in slices:
            fed.setdefault(engine, []).extend(part.tokens)
        return original(engine, slices, interruptible)

    session, _ = open_session(settings(tiny_model(), tiny_model(noise=0.1), n_max=2))
    monkeypatch.setattr(specli.engine.llama.LlamaEngine, "evaluate", record)
    prompt = session.chat_ids([Message("user", "hi")])
    generate(session, prompt, 8)
    assert len(fed) == 2
    assert all(tokens[: len(prompt)] == prompt for tokens in fed.values())


def test_a_template_that_refuses_says_why(tiny_model, open_session):
    """Cases I6."""
    strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    path = tiny_model(chat_template=strict + "{{ m.content }}{% endfor %}")
    session, _ = open_session(settings(path, type="none"))
    with pytest.raises(ConfigError, match="no system role"):
        session.chat_ids([Message("system", "x"), Message("user", "hi")])
    assert session.chat_ids([Message("user", "hi")])


def test_a_model_without_a_template_completes_text(tiny_model, open_session):
    session, _ = open_session(settings(tiny_model(chat_template=None), type="none"))
    assert session.template is None
    with pytest.raises(ConfigError, match="no chat template"):
        session.chat_ids([Message("user", "hi")])


# -- sampling


@pytest.mark.parametrize("verify", ["block", "rejection", "coupled"])
def test_a_seed_repeats_and_another_does_not(tiny_model, open_session, verify):
    texts = {}
    for seed in (1, 2):
        sampling = SamplingOptions(temperature=1.0, seed=seed)
        chosen = settings(tiny_model(), tiny_model(noise=0.1), n_max=3, verify=verify, sampling=sampling)
        session, _ = open_session(chosen)
        assert session.speculation.verify == verify
        prompt = session.text_ids("abc")
        texts[seed] = generate(session, prompt, 30).tokens
        assert generate(session, prompt, 30).tokens == texts[seed]
    assert texts[1] != texts[2]


@pytest.mark.parametrize("verify", ["block", "rejection", "coupled", None])
def test_a_seed_whose_text_may_depend_on_times_is_told(tiny_model, open_session, verify):
    sampling = SamplingOptions(temperature=1.0, seed=7)
    chosen = controlled_settings(tiny_model(), n_max=3, verify=verify, sampling=sampling, type="ngram")
    session, notices = open_session(chosen)
    expected = f"-s 7 with --verify {verify}: the text repeats with --draft-fixed only; --verify coupled repeats it"
    wanted = [f"{expected} with any draft"] if verify in ("block", "rejection") else []
    assert notices == wanted
    session.verifier_for(replace(sampling, seed=8))
    assert notices == wanted
    for other in (
        settings(tiny_model(), n_max=3, verify=verify, sampling=sampling),
        replace(chosen, sampling=replace(sampling, seed=None)),
        replace(chosen, sampling=replace(sampling, temperature=0.0)),
        replace(chosen, speculation=replace(chosen.speculation, type="none")),
    ):
        assert open_session(other)[1] == []


def test_coupled_without_a_seed_names_the_one_it_drew(tiny_model, open_session):
    chosen = settings(tiny_model(), n_max=3, verify="coupled", sampling=SamplingOptions(temperature=1.0))
    first, _ = open_session(chosen)
    assert first.seed is not None
    again, _ = open_session(replace(chosen, sampling=SamplingOptions(temperature=1.0, seed=first.seed)))
    prompt = first.text_ids("abc")
    assert generate(first, prompt, 30).tokens == generate(again, prompt, 30).tokens


def test_a_tiny_temperature_acts_as_greedy(tiny_model, open_session):
    """Cases H18: no overflow."""
    greedy, _ = open_session(settings(tiny_model(), type="none"))
    prompt = greedy.text_ids("abc")
    for temperature in (1e-9, 1e-300):
        sampling = SamplingOptions(temperature=temperature, seed=1)
        session, _ = open_session(settings(tiny_model(), tiny_model(noise=0.1), sampling=sampling))
        answer = generate(session, prompt, 30)
        with closing(make_engine(session.model)) as engine:
            assert_same_choices(engine, prompt, generate(greedy, prompt, 30), answer, CLOSE)


def test_numbers_that_mean_nothing_are_an_error(tiny_model, open_session, monkeypatch):
    session, _ = open_session(settings(tiny_model()))
    original = session.engine.evaluate

    def spoil(slices, interruptible=False):
        evaluation = original(slices, interruptible)
        for rows in evaluation.rows:
            rows[...] = np.nan
        return evaluation

    monkeypatch.setattr(session.engine, "evaluate", spoil)
    with pytest.raises(EngineError, match="nan"):
        generate(session, session.text_ids("abc"), 5)


# -- cancelling and closing


def test_cancelling_before_the_first_token(tiny_model, open_session):
    stop = [False]
    session, _ = open_session(settings(tiny_model(), sampling=ENDLESS), Hooks(cancelled=lambda: stop[0]))
    prompt = session.text_ids("x" * 200)
    stop[0] = True
    answer = generate(session, prompt, 20)
    assert (answer.tokens, answer.text, answer.reason) == ((), "", "cancelled")
    stop[0] = False
    assert len(generate(session, prompt, 20).tokens) == 20


def test_cancelling_keeps_the_text_so_far(tiny_model, open_session):
    stop = [False]
    hooks = Hooks(cancelled=lambda: stop[0])
    session, _ = open_session(settings(tiny_model(), tiny_model(noise=0.1), n_max=4, sampling=ENDLESS), hooks)
    prompt = session.text_ids("abc")
    whole = generate(session, prompt, 40)
    events, texts = [], []
    for event in session.generate(prompt, GenerationOptions(40)):
        events.append(event)
        if isinstance(event, Text):
            texts.append(event.text)
            stop[0] = len(texts) == 4
    stop[0] = False
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"
    assert 4 <= len(finished.tokens) < 40
    assert finished.tokens == whole.tokens[: len(finished.tokens)]
    assert "".join(texts) == plain_text(session, finished.tokens)
    assert generate(session, prompt, 40).tokens == whole.tokens


def test_cancelling_while_loading_closes_what_was_loaded(tiny_model, monkeypatch):
    closed = []
    original = specli.engine.llama.LlamaModel.close

    def close(model):
        closed.append(model)
        original(model)

    monkeypatch.setattr(specli.engine.llama.LlamaModel, "close", close)
    n_asked = [0]

    def cancelled() -> bool:
        n_asked[0] += 1
        return n_asked[0] > stop_at

    for stop_at in (0, 2, 40, 60):
        n_asked[0] = 0
        closed.clear()
        try:
            Session(settings(tiny_model(), tiny_model(noise=0.1)), Hooks(cancelled=cancelled)).close()
        except Cancelled:
            assert closed
        else:
            assert n_asked[0] <= stop_at


def test_progress_is_told_by_name(tiny_model, open_session):
    seen: list[tuple[str, float]] = []
    target, draft = tiny_model(), tiny_model(noise=0.1)
    open_session(settings(target, draft), Hooks(progress=lambda label, done: seen.append((label, done))))
    assert [label for label, _ in dict(seen).items()] == [target.name, draft.name]
    assert (target.name, 1.0) in seen
    assert (draft.name, 1.0) in seen


def test_a_session_closes_twice_and_then_refuses(tiny_model):
    session = Session(settings(tiny_model(), tiny_model(noise=0.1)))
    prompt = session.text_ids("abc")
    assert session.load_s > 0
    session.close()
    session.close()
    with pytest.raises(EngineError, match="closed"):
        generate(session, prompt, 3)


def test_a_failing_draft_frees_the_target(tiny_model, tmp_path, monkeypatch):
    """Weights are not left behind when the second model fails to load."""
    original, made = specli.engine.llama.LlamaModel, []

    class Second(original):
        def __init__(self, *arguments):
            if made:
                raise ModelLoadError("the second model is bad")
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(specli.engine.llama, "LlamaModel", Second)
    with pytest.raises(ModelLoadError, match="second model"):
        Session(settings(tiny_model(), tiny_model(noise=0.1)))
    with pytest.raises(EngineError, match="closed"):
        _ = made[0].handle


def test_events_come_in_order_and_add_up(tiny_model, open_session):
    """Cases J3: what rounds emitted and the first token are all the tokens."""
    session, _ = open_session(settings(tiny_model(), tiny_model(noise=0.1), n_max=4, sampling=ENDLESS))
    prompt = session.text_ids("abc")
    events = list(session.generate(prompt, GenerationOptions(40)))
    assert isinstance(events[0], PrefillDone)
    assert events[0].n_prompt == 3
    assert isinstance(events[-1], Finished)
    answer = collect(events)
    assert answer.stats.n_tokens == len(answer.tokens) == 40
    assert answer.stats.prefill_s > 0
    assert answer.stats.verify_s > 0
    assert answer.stats.draft_s > 0


def test_longer_and_shorter_limits_of_drafts(tiny_model, open_session):
    """--spec-draft-n-min drops short drafts of a point mass whole; --spec-draft-p-min stops early (cases J4)."""
    target, draft = tiny_model(), tiny_model(noise=0.1)
    session, _ = open_session(settings(target, draft, n_max=4, p_min=1.0))
    answer = assert_speculation_changes_nothing(session, session.text_ids("abc"), 30)
    assert (answer.stats.proposed, answer.stats.acceptance_rate) == (0, None)
    session, _ = open_session(settings(target, draft, n_max=4, n_min=4))
    answer = assert_speculation_changes_nothing(session, session.text_ids("abc"), 30)
    assert answer.stats.proposed > 0


def test_costs_are_kept_by_how_the_models_were_loaded_and_drafts_by_how_they_are_judged(tiny_model, open_session):
    """What --exact settled on has costs of its own; a temperature, a seed or a sampler's number changes none."""
    target, draft = tiny_model(), tiny_model(noise=0.1)

    def kept(loaded: dict[str, object] | None = None, **sampling) -> Profile:
        session, _ = open_session(settings(target, draft, sampling=SamplingOptions(**{"temperature": 0, **sampling})))
        session.target_options = replace(session.target_options, **(loaded or {}))
        return session._profile(session.settings.draft)

    first = kept()
    assert kept() == first
    for sampling in ({"temperature": 0.3}, {"temperature": 1.5}, {"temperature": 0.8, "seed": 7}, {"top_k": 3}):
        assert kept(**sampling).costs == first.costs
        assert kept(**sampling).drafts != first.drafts
    assert kept(temperature=0.7) == kept(temperature=0.9)
    assert kept(temperature=0.7, seed=1) == kept(temperature=0.7, seed=2)
    for loaded in ({"flash_attn": "on"}, {"n_threads": 7}, {"cache_type_k": "q8_0"}, {"n_sequences": 4}):
        assert kept(loaded).costs != first.costs
