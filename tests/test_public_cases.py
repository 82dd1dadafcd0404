"""Faults that users of neighbouring projects reported in public: which test shows that we do not have them.

Names are those of the collection of cases (A1, C13, …); most have their test beside the module that they are about, and
``CASES`` says where. The others are here, named by case. ``ELSEWHERE`` says why a case has none.
"""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import llama_cpp
import pytest
from support import HANG_S, generate, load_model, make_engine, settings
from tiny_gguf import CONTROL, NORMAL

from specli.config import GenerationOptions, SamplingOptions
from specli.errors import ConfigError, RollbackUnsupported
from specli.session import Session
from specli.text import TextStream

CASES: dict[str, list[str]] = {
    "A1": ["test_identity.py::test_greedy_is_identical_for_every_drafter_and_k"],
    "A3": ["test_identity.py::test_prompts_are_fed_alike_on_both_paths", "test_decode.py::test_small_batches"],
    "A4": ["test_identity.py::test_a_target_drafts_for_itself_without_loading_twice"],
    "A6": ["test_public_cases.py::test_a6_as_many_tokens_as_asked_with_the_target_as_its_own_draft"],
    "A7": ["test_session.py::test_smollm2_prompts_become_the_right_ids"],
    "B1": ["test_decode.py::test_cache_lengths_after_a_round"],
    "B2": ["test_decode.py::test_acceptance_does_not_decay"],
    "B5": [
        "test_session.py::test_a_target_that_cannot_roll_back_is_decoded_plainly",
        "test_session.py::test_a_draft_that_cannot_roll_back_is_left_out",
        "test_engine_llama.py::test_a_recurrent_memory_refuses_and_is_cleared",
    ],
    "B6": ["test_public_cases.py::test_b6_a_refused_removal_is_never_ignored"],
    "B7": ["test_conversation.py::test_far_rewinds_of_a_sliding_window"],
    "B8": ["test_engine_llama.py::test_rounds_roll_back_at_every_length_around_a_sliding_window"],
    "B10": ["test_conversation.py::test_the_end_of_turn_is_where_the_next_turn_goes_on"],
    "B11": ["test_decode.py::test_a_draft_that_is_always_empty_is_plain_decoding"],
    "B12": ["test_conversation.py::test_a_recurrent_memory_goes_on_or_starts_over"],
    "C1": [
        "test_decode.py::test_every_context_edge",
        "test_session.py::test_a_context_may_end_inside_a_draft",
    ],
    "C3": ["test_session.py::test_a_draft_may_have_the_shorter_context"],
    "C5": ["test_session.py::test_prompts_of_any_length_pass_through_small_batches"],
    "C8": ["test_session.py::test_a_length_that_just_fits_is_served"],
    "C10": ["test_cli.py::test_a_prompt_that_is_too_long"],
    "C13": ["test_public_cases.py::test_c13_sizes_of_nothing_and_less"],
    "D1": ["test_session.py::test_other_vocabularies_are_refused_before_anything_is_loaded"],
    "D2": ["test_vocab.py::test_any_size_gap_is_accepted_and_told"],
    "D4": ["test_vocab.py::test_bos_ids_that_are_not_added_may_differ", "test_vocab.py::test_added_tokens"],
    "D6": ["test_vocab.py::test_one_different_text", "test_vocab.py::test_a_difference_below_id_5_is_a_note"],
    "D7": ["test_cli.py::test_a_draft_of_another_vocabulary"],
    "D8": ["test_session.py::test_only_the_target_knows_where_text_ends"],
    "D10": ["test_public_cases.py::test_d10_speculation_is_never_silently_off"],
    "F1": ["test_public_cases.py::test_f1_split_characters_of_smollm2"],
    "F4": ["test_public_cases.py::test_f4_a_model_that_writes_rubbish"],
    "F5": ["test_text.py::test_illegal_bytes_cost_nothing_around_them"],
    "F6": ["test_engine_llama.py::test_every_id_of_the_vocabulary_keeps_all_its_bytes"],
    "F7": ["test_public_cases.py::test_f7_spaces_of_a_sentencepiece_vocabulary"],
    "G1": ["test_decode.py::test_stop_strings_cut_text_and_tokens_alike"],
    "G3": ["test_decode.py::test_stop_strings_cut_text_and_tokens_alike"],
    "G4": ["test_decode.py::test_stop_strings_cut_text_and_tokens_alike"],
    "G5": ["test_text.py::test_last_characters_before_a_stop_are_given_out"],
    "G7": ["test_decode.py::test_text_that_only_looks_like_a_stop"],
    "G9": ["test_public_cases.py::test_g9_stop_strings_that_are_none"],
    "G10": ["test_decode.py::test_the_end_is_honoured_at_every_position"],
    "G11": ["test_decode.py::test_the_end_is_honoured_at_every_position"],
    "G13": ["test_decode.py::test_any_drafter_k_and_limit_gives_the_plain_tokens"],
    "G15": ["test_decode.py::test_the_end_is_honoured_at_every_position"],
    "G16": [
        "test_session.py::test_nothing_asked_is_no_work",
        "test_cli.py::test_a_value_out_of_range_is_named",
        "test_decode.py::test_emitted_tokens_have_the_targets_law",
    ],
    "H1": ["test_identity.py::test_every_sampler_gives_plain_decodings_text"],
    "H3": ["test_identity.py::test_every_sampler_gives_plain_decodings_text"],
    "H4": ["test_decode.py::test_verified_rows_see_the_right_history"],
    "H5": ["test_identity.py::test_a_bias_reaches_every_position"],
    "H6": ["test_identity.py::test_a_bias_reaches_every_position"],
    "H7": [
        "test_identity.py::test_every_sampler_gives_plain_decodings_text",
        "test_identity.py::test_logprobs_are_plain_decodings",
    ],
    "H8": ["test_identity.py::test_a_schema_is_kept_at_temperature_1"],
    "H11": ["test_verify.py::test_greedy_draft_on_the_public_example"],
    "H13": ["test_verify.py::test_first_token_of_a_judged_draft_has_the_targets_law"],
    "H15": [
        "test_serve_api.py::test_a_seed_gives_one_text_whatever_was_asked_before",
        "test_serve_api.py::test_a_seed_gives_one_text_alone_and_in_company",
    ],
    "H17": ["test_serve_api.py::test_a_greedy_answer_is_the_same_in_company"],
    "H18": [
        "test_serve_api.py::test_a_temperature_of_almost_nothing_is_greedy",
        "test_serve_api.py::test_nan_is_refused",
    ],
    "H19": ["test_serve_api.py::test_settings_out_of_bounds_are_refused", "test_serve_api.py::test_nan_is_refused"],
    "I1": ["test_session.py::test_an_empty_prompt_is_refused_and_the_next_one_served"],
    "I3": ["test_session.py::test_there_is_exactly_one_bos_where_one_belongs"],
    "I5": ["test_session.py::test_smollm2_prompts_become_the_right_ids"],
    "I6": ["test_public_cases.py::test_i6_a_strict_template_says_what_is_wrong"],
    "I8": ["test_session.py::test_control_text_in_a_message_stays_text"],
    "J1": ["test_stats.py::test_j1_acceptance_never_counts_the_targets_own_tokens"],
    "J3": ["test_stats.py::test_j3_eos_inside_a_run_ends_the_count_there"],
    "J4": ["test_stats.py::test_j4_a_draft_thrown_away_before_it_was_judged_is_no_rejection"],
    "J5": ["test_cli.py::test_undefined_figures_are_null"],
    "J7": ["test_stats.py::test_j7_speed_is_of_the_tokens_generated_not_of_those_asked_for"],
    "J8": ["test_stats.py::test_j8_prompt_time_and_loading_stay_out_of_the_decode_rate"],
    "J10": ["test_public_cases.py::test_j10_parts_are_not_larger_than_the_whole"],
    "J11": ["test_public_cases.py::test_j11_five_runs_accept_the_same"],
    "J12": ["test_ngram.py::test_work_does_not_grow_with_the_history"],
    "J14": ["test_public_cases.py::test_j14_memory_does_not_grow_with_requests"],
    "K1": ["test_bad_files.py::test_shards"],
    "K4": ["test_gguf_file.py::test_truncated_model_says_both_sizes", "test_cli.py::test_models_that_cannot_be_loaded"],
    "K6": ["test_bad_files.py::test_formats"],
    "K7": ["test_vocab.py::test_bad_vocabularies", "test_gguf_file.py::test_claimed_sizes_are_not_allocated"],
    "K8": ["test_bad_files.py::test_a_file_that_is_no_text_model_says_what_it_is"],
    "L1": [
        "test_cli.py::test_no_escape_code_reaches_a_pipe",
        "test_terminal.py::test_the_screen_holds_the_pipes_text_the_tint_and_the_summary",
    ],
    "L3": [
        "test_cli.py::test_a_reader_that_leaves_ends_it_in_silence",
        "test_public_cases.py::test_l3_other_commands_into_a_closed_pipe",
    ],
    "L4": ["test_cli.py::test_ctrl_c_in_a_long_prompt", "test_cli.py::test_the_second_ctrl_c_kills"],
    "L6": ["test_cli.py::test_arguments_and_paths_may_be_any_language"],
    "L8": ["test_cli.py::test_prompts_that_cannot_be_used", "test_bad_files.py::test_bytes_that_are_not_text"],
    "L9": ["test_cli.py::test_output_is_utf_8_whatever_the_locale"],
    "M1": ["test_serve_api.py::test_gone_while_streaming", "test_serve_api.py::test_gone_while_waiting_for_an_answer"],
    "M2": ["test_serve_api.py::test_gone_during_the_prompt"],
    "M3": ["test_serve_api.py::test_gone_while_queued"],
    "M5": ["test_serve_api.py::test_gone_while_queued"],
    "M6": ["test_serve_api.py::test_every_chunk_is_whole"],
    "M7": ["test_serve_api.py::test_every_chunk_is_whole"],
    "M8": ["test_serve_api.py::test_every_chunk_is_whole"],
    "M9": [
        "test_serve_api.py::test_later_errors_come_in_the_stream",
        "test_serve_api.py::test_a_prompt_that_is_too_long_is_refused_before_the_stream_opens",
    ],
    "M11": [
        "test_identity.py::test_logprobs_are_plain_decodings",
        "test_serve_api.py::test_logprobs_are_those_of_plain_decoding",
    ],
    "M12": [
        "test_identity.py::test_logprobs_are_plain_decodings",
        "test_serve_api.py::test_logprobs_are_those_of_plain_decoding",
    ],
    "M13": ["test_serve_identity.py::test_identical_clients_get_the_same_text_and_acceptance"],
    "M15": [
        "test_operations.py::test_the_first_scrape_is_well_formed_and_its_names_keep_the_conventions",
        "test_operations.py::test_every_name_that_is_asked_for_is_there",
    ],
}
ELSEWHERE = {
    "C7": "no request names a length of drafts: the field is unknown, which is 400 (test_serve_protocol.py)",
    "C12": "every slot has -c tokens of its own, none can take them from another",
    "J13": "a figure of the benchmark",
}
SECTIONS = {
    "A": (1, 3, 4, 6, 7),
    "B": (1, 2, 5, 6, 7, 8, 10, 11, 12),
    "C": (1, 3, 5, 7, 8, 10, 12, 13),
    "D": (1, 2, 4, 6, 7, 8, 10),
    "F": (1, 4, 5, 6, 7),
    "G": (1, 3, 4, 5, 7, 9, 10, 11, 13, 15, 16),
    "H": (1, 3, 4, 5, 6, 7, 8, 11, 13, 15, 17, 18, 19),
    "I": (1, 3, 5, 6, 8),
    "J": (1, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14),
    "K": (1, 4, 6, 7, 8),
    "L": (1, 3, 4, 6, 8, 9),
    "M": (1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 15),
}
ENDLESS = SamplingOptions(temperature=0, ignore_eos=True)
POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and descriptors")


def test_every_case_has_a_test_that_is_there() -> None:
    wanted = {f"{letter}{number}" for letter, numbers in SECTIONS.items() for number in numbers}
    assert wanted == {*CASES, *ELSEWHERE}
    folder = Path(__file__).parent
    known: dict[str, set[str]] = {}
    for names in CASES.values():
        for file, _, name in (test.partition("::") for test in names):
            if file not in known:
                tree = ast.parse((folder / file).read_text("utf-8"))
                known[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in known[file], f"{file}::{name}"


@pytest.fixture
def figures(specli, tiny_model):
    """What ``--stats-json -`` says of a greedy run of the tiny model, and stderr."""

    def figures(*flags, prompt="abc", model=None, code=0):
        command = ("run", "-m", model or tiny_model(), "-t", "1", "--temp", "0", "-p", prompt, "--stats-json", "-")
        ended = specli(*command, *flags)
        assert ended.code == code, ended.err
        return json.loads(ended.out), ended.err

    return figures


# -- A, B


@pytest.mark.parametrize("n", ["1", "4", None])
def test_a6_as_many_tokens_as_asked_with_the_target_as_its_own_draft(figures, tiny_model, n):
    limit = ("-n", n) if n else ()
    own, _ = figures("-md", tiny_model(), *limit)
    plain, _ = figures("--spec-type", "none", *limit)
    assert own["tokens"] == plain["tokens"]
    assert own["finish_reason"] == plain["finish_reason"]
    assert n is None or len(own["tokens"]) == int(n)
    assert n is not None or own["finish_reason"] in ("eos", "length")


def test_b6_a_refused_removal_is_never_ignored(tiny_model, monkeypatch):
    """``seq_rm`` says no once: the generation fails, and the next one is as if nothing had been."""
    with Session(settings(tiny_model(), tiny_model(noise=0.3), n_max=4, fixed=True, sampling=ENDLESS)) as session:
        prompt = session.text_ids("abc")
        whole = generate(session, prompt, 40)
        assert whole.stats.accepted < whole.stats.proposed  # there is something to remove
        remove = llama_cpp.llama_memory_seq_rm
        for at in (1, 2, 5):
            calls = [0]

            def refuse(memory, sequence, start, end, calls=calls, at=at):
                is_tail = start > 0
                calls[0] += is_tail
                return False if is_tail and calls[0] == at else remove(memory, sequence, start, end)

            monkeypatch.setattr(llama_cpp, "llama_memory_seq_rm", refuse)
            with pytest.raises(RollbackUnsupported):
                generate(session, prompt, 40)
            monkeypatch.undo()
            assert generate(session, prompt, 40).tokens == whole.tokens


# -- C, D


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (("-b", "0"), 2, "-b/--batch-size got 0, expected at least 1 token"),
        (("-b", "-1"), 2, "-b/--batch-size got -1"),
        (("-ub", "0"), 2, "-ub/--ubatch-size got 0"),
        (("-c", "-5"), 2, "-c/--ctx-size got -5, expected 0 (as trained) or more tokens"),
        (("--draft-max", "-1"), 2, "--spec-draft-n-max got -1, expected auto, or 0 (no drafting) to 256 tokens"),
        (("-n", "-3"), 2, "-n/--predict got -3"),
        (("-t", "-2"), 2, "-t/--threads got -2"),
        (("-c", "1"), 5, "the prompt has 3 tokens, the context holds 1"),
        (("-c", "0", "-n", "5"), 0, 5),
        (("-n", "-2", "-c", "32"), 0, 30),  # until the context is full: 32 − 3 + 1
        (("-n", "-1", "-c", "32"), 0, 30),
        (("-t", "0", "-n", "5"), 0, 5),
        (("-c", "3", "-n", "5"), 0, 1),
        (("-b", "1", "-n", "5"), 0, 5),
        (("-ub", "1", "-n", "5"), 0, 5),
        (("--draft-max", "0", "-n", "5"), 0, 5),
    ],
)
def test_c13_sizes_of_nothing_and_less(specli, tiny_model, flags, code, expected):
    command = ("run", "-m", tiny_model(), "--temp", "0", "--raw", "-p", "abc", "--ignore-eos", "--stats-json", "-")
    ended = specli(*command, *(() if "-t" in flags else ("-t", "1")), *flags)
    assert ended.code == code
    if code:
        assert expected in ended.err.splitlines()[-1]
        assert ended.out == b""
    else:
        assert len(json.loads(ended.out)["tokens"]) == expected


@pytest.mark.parametrize(
    ("flags", "target", "draft", "reason", "is_told"),
    [
        ((), "mamba", "llama", "cannot drop rejected tokens; decoding plainly", True),
        ((), "jamba", None, "cannot drop rejected tokens; decoding plainly", True),
        ((), "llama", "mamba", "cannot drop rejected tokens, so it cannot draft", True),
        (("--no-warmup",), "llama", "jamba", "cannot drop rejected tokens, so it cannot draft", True),
        (("-b", "1"), "llama", "llama", "a batch of 1 token has no place for a draft", True),
        (("--spec-type", "none"), "llama", "llama", "--spec-type none was given", False),
        (("--spec-draft-n-max", "0"), "llama", "llama", "--spec-draft-n-max is 0", False),
    ],
)
def test_d10_speculation_is_never_silently_off(figures, tiny_model, flags, target, draft, reason, is_told):
    """What the user did not ask for is told in one line; all of it stands in the figures."""
    models = () if draft is None else ("-md", tiny_model(draft))
    told, err = figures("-n", "8", *models, *flags, model=tiny_model(target))
    assert told["speculating"] is False
    assert reason in told["reason"]
    assert (told["proposed"], told["accepted"], told["acceptance_rate"]) == (0, 0, None)
    assert err == (f"speculation off: {told['reason']}\n" if is_told else "")


# -- F, G


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"), [("🦙", [10813, 116, 243]), ("日本", [23274, 115, 40993]), ("a🦙b", None), ("👩‍👩‍👧", None)]
)
def test_f1_split_characters_of_smollm2(target_model, text, ids):
    """One by one, two and one, all at once: as the tokens of rounds arrive."""
    found = target_model.tokenize(text, False, False)
    assert ids is None or found == ids
    for cuts in ([1] * len(found), [2, 1], [1, 2], [len(found)]):
        stream, parts, at = TextStream(target_model.piece, ()), [], 0
        for n in cuts:
            spans = [span for token in found[at : at + n] for span in stream.push(token, "target")]
            parts.append("".join(span.text for span in spans))
            at += n
        spans = [span for token in found[at:] for span in stream.push(token, "target")]
        parts.append("".join(span.text for span in [*spans, *stream.finish()]))
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_f4_a_model_that_writes_rubbish(specli, tiny_model, drafter):
    """500 tokens of random bytes: all of it arrives as valid UTF-8, on stdout as in the figures."""
    command = ("run", "-m", tiny_model(), "-md", tiny_model(noise=0.1), "-t", "1", "-c", "600", "-p", "abc", "-s", "7")
    command += ("--temp", "1.5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "500", "--ignore-eos")
    ended = specli(*command, "--spec-type", drafter)
    assert ended.code == 0, ended.err
    text = ended.out.decode("utf-8")
    assert "\ufffd" in text
    told = json.loads(specli(*command, "--spec-type", drafter, "--stats-json", "-").out)
    assert (told["text"], len(told["tokens"])) == (text, 500)


def test_f7_spaces_of_a_sentencepiece_vocabulary(tiny_model, closing_stack):
    """Decoded one at a time, inner spaces stay; the one before the text is what SentencePiece puts there."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁Dear", "▁Name", ",", "▁I", "▁hope", "hope", "I"]
    types = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * (len(words) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(1, len(words) - 258)]
    spm = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.merges": None}
    path = tiny_model(tokens=tuple(words), token_types=tuple(types), **spm, **{"tokenizer.ggml.pre": "default"})
    model = closing_stack.enter_context(closing(load_model(path)))
    ids = model.tokenize("Dear Name, I hope", False, False)
    pieces = [model.piece(token) for token in ids]
    assert b"".join(pieces) in (b" Dear Name, I hope", b"Dear Name, I hope")
    stream = TextStream(model.piece, ())
    text = "".join(span.text for token in ids for span in stream.push(token, "target"))
    text += "".join(span.text for span in stream.finish())
    assert text == b"".join(pieces).decode()


def test_g9_stop_strings_that_are_none(figures, specli, tiny_model):
    assert "empty stop string" in specli("run", "-m", tiny_model(), "-p", "hi", "-r", "").error
    assert "empty stop string" in specli("run", "-m", tiny_model(), "-p", "hi", "-r", "x", "-r", "").error
    for stops in (("",), ("", "x")):
        with pytest.raises(ConfigError, match="empty stop string"):
            GenerationOptions(stops=stops)
    plain, _ = figures("-n", "20")
    hundred = [flag for i in range(100) for flag in ("-r", f"never {i}")]
    assert figures("-n", "20", *hundred)[0]["text"] == plain["text"]


# -- I


def test_i6_a_strict_template_says_what_is_wrong(tiny_model):
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    from specli.chat import Message

    with Session(settings(tiny_model(chat_template=strict), type="none")) as session:
        roles = ["user", "user", "user", "assistant", "assistant"]
        with pytest.raises(ConfigError, match="Conversation roles must alternate user/assistant"):
            session.chat_ids([Message(role, "x") for role in roles])
        assert len(session.chat_ids([Message("user", "x"), Message("assistant", "y"), Message("user", "z")])) == 3


# -- J


def test_j10_parts_are_not_larger_than_the_whole(figures, tiny_model):
    for flags in ((), ("-md", tiny_model()), ("-md", tiny_model(noise=0.1), "--draft-fixed"), ("--spec-type", "none")):
        told, _ = figures("-n", "50", "-c", "200", "--ignore-eos", *flags)
        assert told["accepted"] <= told["proposed"]
        assert told["accepted"] + told["rounds"] + 1 == len(told["tokens"]) == 50  # one of the target's own each
        time_s = told["time_s"]
        assert all(part >= 0 for part in time_s.values())
        assert told["ttft_s"] >= time_s["prefill"] * 0.99
        decode_s = told["tpot_ms"] * 49 / 1000
        assert sum(time_s[name] for name in ("draft", "verify", "host")) <= decode_s * 1.05


def test_j11_five_runs_accept_the_same(tiny_model):
    """With a fixed length to the token; a controller measures time, so there only the text is promised."""
    for fixed in (True, False):
        chosen = settings(tiny_model(), tiny_model(noise=0.1), n_max=4, fixed=fixed, sampling=ENDLESS)
        answers = []
        for _ in range(5):
            with Session(chosen) as session:
                answers.append(generate(session, session.text_ids("abc"), 40))
        assert len({answer.tokens for answer in answers}) == 1
        assert not fixed or len({(answer.stats.proposed, answer.stats.accepted) for answer in answers}) == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_j14_memory_does_not_grow_with_requests(tiny_model):
    """200 distinct prompts of 64 tokens, with and without reuse of what the caches hold."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    chosen = settings(tiny_model(), tiny_model(noise=0.1), n_max=4, sampling=ENDLESS)
    with Session(chosen) as session:
        sizes = []
        for i in range(200):
            prompt = session.text_ids(f"{i:04}".ljust(64, "x"))
            for _ in session.generate(prompt, GenerationOptions(8), reuse=bool(i % 2)):
                pass
            sizes.append(resident())
    assert max(sizes[100:]) - max(sizes[:100]) < 4 << 20  # bytes


# -- L


@POSIX
@pytest.mark.parametrize(
    "command", ["check-tokenizers", "plan", "plan -o json", "run --show-config", "run --list-devices"]
)
@pytest.mark.parametrize("stderr", ["open", "closed"])
def test_l3_other_commands_into_a_closed_pipe(specli, tiny_model, command, stderr):
    reader, writer = os.pipe()
    os.close(reader)
    models = ("-m", tiny_model(), "-md", tiny_model(noise=0.1))
    options = {"preexec_fn": lambda: os.close(2), "env": {"PYTHONUNBUFFERED": "1"}} if stderr == "closed" else {}
    with specli.start(*command.split(), *models, stdout=writer, **options) as process:
        os.close(writer)
        _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="sets the size of a pipe")
def test_l4_an_interrupt_while_text_is_written_out(specli, tiny_model):
    """The reader is slow, so the process waits in a write when the signal comes; what it wrote stays."""
    import fcntl
    import termios

    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, 1031, 4096)  # F_SETPIPE_SZ
    endless = ("-n", "-1", "-c", "60000", "--ignore-eos", "--spec-type", "none")
    with specli.start(
        *("run", "-m", tiny_model(), "-t", "1", "--temp", "0", "-p", "abc"), *endless, stdout=writer
    ) as process:
        os.close(writer)
        while len(select.select([reader], [], [], 1)[0]) == 0:
            pass
        waiting = 0
        while waiting < room - 8:  # until a write would wait
            waiting = int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out = b""
        while chunk := os.read(reader, 1 << 16):
            out += chunk
        os.close(reader)
        assert process.wait(HANG_S) == 130
        assert process.stderr.read() == b""
    assert room - 8 <= len(out) < room + 200  # bytes: no more than a round or two after the signal
    out.decode("utf-8")


def test_a_context_of_every_length_up_to_the_prompts(tiny_model):
    """Beside C1: a prompt of n tokens in contexts of n and a little more, with drafts far longer than what is left."""
    with closing(load_model(tiny_model())) as model:
        make_engine(model, n_ctx=1).close()
    for n_ctx in (3, 4, 5, 9, 20):
        chosen = settings(tiny_model(), tiny_model(), n_max=16, fixed=True, sampling=ENDLESS, model={"n_ctx": n_ctx})
        with Session(chosen) as session:
            prompt = session.text_ids("abc")
            answer = generate(session, prompt)
            assert (len(answer.tokens), answer.reason) == (n_ctx - 3 + 1, "length")
            assert answer.tokens == generate(session, prompt, speculate=False).tokens
