"""``specli run`` as a process: exit codes, streams, signals. Tiny random models but where a test says ``model``.

A tiny model writes random bytes, control characters among them; on a pipe they pass as they are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import HANG_S, CommandLine

from specli import __version__
from specli.cli.arguments import LACKING, REMOVED
from specli.cli.main import application

POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and descriptors")
KEYS = {
    *("text", "tokens", "prompt_tokens", "rounds", "proposed", "accepted", "acceptance_rate", "mean_accepted_length"),
    *("block_efficiency", "per_position_acceptance", "ttft_s", "tpot_ms", "decode_tok_s", "prefill_tok_s", "time_s"),
    *("finish_reason", "seed", "verify", "speculating", "reason"),
}


@pytest.fixture(scope="module")
def tiny(specli, tiny_model):
    """``tiny("-n", "5")``: run the tiny model, greedy and on one thread; keyword arguments as ``CommandLine``."""

    def run(*arguments, prompt: str | None = "abc", model: Path | None = None, **options):
        prompts = () if prompt is None else ("-p", prompt)
        return specli("run", "-m", model or tiny_model(), "-t", "1", "--temp", "0", *prompts, *arguments, **options)

    return run


def strict_json(data: bytes) -> dict:
    """RFC 8259: no NaN, no Infinity."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} in JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


def figures(run) -> dict:
    assert run.code == 0, run.err
    return strict_json(run.out)


# -- clean failures: a code, one line on stderr, nothing on stdout


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        *(("--temp", value) for value in ("nan", "inf", "-1", "warm")),
        *(("--top-k", value) for value in ("-2", "1.5", "2147483648")),
        *(("--top-p", value) for value in ("0", "-1", "1.1", "nan")),
        *(("--min-p", value) for value in ("-0.1", "1.1", "nan")),
        *(("-s", value) for value in ("-2", "4294967296", "1.5")),
        *(("-n", value) for value in ("-3", "1.5", "many", "2147483648")),
        *(("-c", value) for value in ("-5", "2147483648", "1k")),
        *(("-b", value) for value in ("0", "-1")),
        *(("-ub", value) for value in ("0", "-1")),
        *(("-t", value) for value in ("-2", "513", "all")),
        *(("-ngl", value) for value in ("many", "-3", "1.5", "--", "²")),
        ("-fa", "maybe"),
        ("-ctk", "q9_0"),
        ("-ctv", "q9_0"),
        ("-ctkd", "q9_0"),
        *(("--spec-type", value) for value in ("foo", "draft-eagle3", "draft-mtp", "draft", "")),
        *(("--spec-draft-n-max", value) for value in ("-1", "257", "x")),
        *(("--spec-draft-n-min", value) for value in ("-1", "257")),
        *(("--spec-draft-p-min", value) for value in ("-0.1", "1.5", "nan")),
        ("--verify", "maybe"),
        ("-r", ""),
    ],
)
def test_a_value_out_of_range_is_named(tiny, flags, value):
    """Cases C13, H18, H19."""
    run = tiny(flags, value)
    assert run.code == 2
    assert flags.removesuffix("d" if flags == "-ctkd" else "") in run.error
    assert " got " in run.error or "Invalid value" in run.error or value.startswith("draft")


@pytest.mark.parametrize("target", ["no/such/folder.json", "."])
def test_a_json_file_that_cannot_be_written_is_told_before_any_work(tiny, tmp_path, target):
    run = tiny("--stats-json", tmp_path / target, model=tmp_path / "missing.gguf")
    assert run.code == 2
    assert "cannot be written" in run.error


def test_settings_that_exclude_each_other(tiny):
    assert "flash attention" in tiny("-fa", "off", "-ctv", "q8_0").error
    assert "--raw" in tiny("--raw", "-sys", "be kind").error


@pytest.mark.parametrize("flags", [("-c", "0"), ("-t", "0"), ("-n", "-2"), ("-ngl", "0"), ("--spec-draft-n-max", "0")])
def test_values_that_mean_something_special(tiny, flags):
    run = tiny(*flags, "--stats-json", "-", *(() if flags[0] == "-n" else ("-n", "3")))
    assert len(figures(run)["tokens"]) >= 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bogus",), "No such command 'bogus'"),
        (("run", "--nope"), "No such option: --nope"),
        (("run", "-Z", "1"), "-Z"),
        (("run", "-p", "hi", "more"), "unexpected extra argument"),
        (("run", "-p"), "requires an argument"),
        (("run", "-p", "hi", "-n5"), "-n5 is not an option; write the value apart: -n 5"),
        (("run", "-p", "hi", "-mfile.gguf"), "write the value apart: -m file.gguf"),
        (("run", "-p", "hi", "-mu", "http://x"), "-mu is a llama.cpp option that specli does not have"),
        (("run", "-p", "hi", "--adaptive-decay", "2"), "--adaptive-decay is a llama.cpp option"),
        (("run", "-p", "hi", "--adaptive-decay=2"), "--adaptive-decay is a llama.cpp option"),
    ],
)
def test_words_that_are_not_understood(specli, arguments, expected):
    run = specli(*arguments)
    assert run.code == 2
    assert expected in run.error


@pytest.mark.parametrize("flag", ["--adaptive-target", "-np", "--image", "-lzm", "--spm-infill", "--no-kv-unified"])
def test_llama_cpp_flags_that_are_lacking_are_told_apart(tiny, flag):
    assert flag in LACKING
    assert tiny(flag, "1").error == f"{flag} is a llama.cpp option that specli does not have; leave it out"


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (("-p", "a", "-f", "b"), None, "both -p and -f were given"),
        ((), None, "the prompt is empty"),
        (("-p", ""), None, "the prompt is empty"),
        (("-f", "-"), b"", "the prompt is empty"),
        ((), b"\n", "the prompt is empty"),
        (("-f", "missing.txt"), None, "cannot read the prompt file missing.txt"),
        (("-f", "."), None, "cannot read the prompt file"),
        ((), b"ok \x9d.", "standard input is not UTF-8: byte 0x9d at offset 3"),
        ((), b"\xff", "byte 0xff at offset 0"),
        ((), b"\xed\xa0\x80", "byte 0xed at offset 0"),
        (("-p", b"a\xffb"), None, "an argument is not UTF-8"),
        (("-p", "a", b"--\xff"), None, "not UTF-8"),
        (("-p", "a", "-r", b"\x9d"), None, "an argument is not UTF-8"),
    ],
)
def test_prompts_that_cannot_be_used(tiny, arguments, stdin, expected):
    """Cases I1, L8."""
    run = tiny(*arguments, prompt=None, stdin=stdin)
    assert run.code == 2
    assert expected in run.error


def test_a_prompt_file_that_is_not_utf_8(tiny, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("déjà".encode("latin-1"))
    run = tiny("-f", tmp_path / "latin1.txt", prompt=None)
    assert run.code == 2
    assert "latin1.txt is not UTF-8: byte 0xe9 at offset 1" in run.error


@pytest.mark.parametrize("option", ["-m", "-md"])
@pytest.mark.parametrize("fault", ["missing", "empty", "text", "cut", "one byte short", "folder", "vocabulary"])
def test_models_that_cannot_be_loaded(tiny, tiny_model, tmp_path, option, fault):
    """Cases K4, K8."""
    path = tmp_path / "bad.gguf"
    whole = tiny_model().read_bytes()
    if fault == "vocabulary":
        path = tiny_model(vocab_only=True)
    elif fault == "folder":
        path = tmp_path
    elif fault != "missing":
        contents = {"empty": b"", "text": b"Once\n", "cut": whole[: len(whole) // 2], "one byte short": whole[:-1]}
        path.write_bytes(contents[fault])
    run = tiny(option, path)
    assert run.code == 3
    assert path.name in run.error
    assert "expected" in run.error


def test_a_draft_of_another_vocabulary(tiny, draft_path):
    """Cases D1, D7: the rule, both values, and the way out."""
    run = tiny("-md", draft_path)
    assert run.code == 4
    for part in ("id 5", "272 tokens and the draft 49152", "run without -md", "--spec-type ngram"):
        assert part in run.error


def test_a_prompt_that_is_too_long(tiny):
    """Cases C10."""
    run = tiny("-c", "64", "--raw", prompt="x" * 100)
    assert run.code == 5
    assert "100 tokens, the context holds 64" in run.error


@POSIX
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_context_that_memory_cannot_hold(specli, tiny_model):
    import resource

    with specli.start(
        *("run", "-m", tiny_model(), "-t", "1", "-p", "hi", "-c", "200000000", "-fit", "off"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    ) as process:
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (6, b"")
        assert err.count(b"\n") == 1
        assert b"could not make a context of 200000000 tokens" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [(), ("--stats-json", "-")])
def test_a_full_disk_is_one_line(specli, tiny_model, flags):
    command = ("run", "-m", tiny_model(), "-t", "1", "-p", "hi", "-n", "9", *flags)
    with Path("/dev/full").open("wb") as full, specli.start(*command, stdout=full) as process:
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert err.count(b"\n") == 1
    assert b"No space left" in err


@pytest.mark.parametrize(
    "arguments",
    [("-m", "missing.gguf", "-p", "hi"), ("-p", "hi", "--temp", "nan"), ("-p", "hi", "--nope"), ("-p", "")],
)
def test_a_traceback_is_shown_with_debug_only(specli, arguments):
    plain, debug = specli("run", *arguments), specli("run", *arguments, "--debug")
    assert plain.error
    assert debug.code == plain.code
    assert debug.out == b""
    assert "Traceback (most recent call last)" in debug.err
    assert debug.err.splitlines()[-1] == plain.err.strip()


# -- help


def test_the_version_names_both_parts(specli):
    run = specli("--version")
    assert (run.code, run.err) == (0, "")
    assert run.out.decode() == f"specli {__version__} (llama-cpp-python 0.3.36)\n"


def test_help_mentions_every_option_and_command(specli):
    import typer

    command = typer.main.get_command(application())
    for arguments in (("--help",), ("-h",), ()):
        run = specli(*arguments)
        assert (run.code, run.err) == (0, "")
        assert all(name in run.out.decode() for name in command.commands)
    run = specli("run", "--help", env={"COLUMNS": "200"})
    assert (run.code, run.err) == (0, "")
    text = run.out.decode()
    assert "\x1b" not in text
    for option in command.commands["run"].params:
        assert any(name in text for name in option.opts), option.opts


# -- names from llama.cpp


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_names_still_work_and_say_so(tiny, name):
    run = tiny(name, "1", "-n", "12", "--stats-json", "-", prompt="abcabcabcabc")
    assert run.err == f"specli: note: {name} is llama.cpp's former name of {REMOVED[name]}; taken as that\n"
    told = figures(run)
    if "min" not in name:
        assert len(told["per_position_acceptance"]) <= 1


def test_spec_types_of_llama_cpp_are_mapped(tiny, tiny_model):
    flags = ("--spec-type", "draft-simple", "--draft-fixed", "-md", tiny_model(noise=0.1))
    run = tiny(*flags, "-n", "9", "--stats-json", "-")
    assert "specli's own draft drafter is used" in run.err
    assert figures(run)["proposed"] > 0


def test_the_environment_is_read_and_flags_beat_it(specli, tiny_model):
    env = {
        "LLAMA_ARG_MODEL": str(tiny_model()),
        "LLAMA_ARG_N_PREDICT": "3",
        "LLAMA_ARG_TEMPERATURE": "0",
        "LLAMA_ARG_THREADS": "1",
        "LLAMA_ARG_SPEC_TYPE": "none",
    }
    told = figures(specli("run", "-p", "hi", "--stats-json", "-", env=env))
    assert (len(told["tokens"]), told["verify"], told["speculating"]) == (3, "greedy", False)
    told = figures(specli("run", "-p", "hi", "-n", "2", "--spec-type", "ngram", "--stats-json", "-", env=env))
    assert (len(told["tokens"]), told["speculating"]) == (2, True)
    assert specli("run", "-p", "hi", env={**env, "LLAMA_ARG_CTX_SIZE": "4"}).code == 5
    run = specli("run", "-p", "hi", env={**env, "LLAMA_ARG_N_PREDICT": "many"})
    assert run.code == 2
    assert "--n-predict" in run.error
    assert specli("run", "-p", "hi", env={**env, "LLAMA_ARG_FLASH_ATTN": "maybe"}).code == 2


# -- prompts


def test_a_prompt_may_come_from_anywhere(tiny, tmp_path):
    """One newline at the end of a file is cut; nothing of -p is."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße 🦙\n".encode())
    flags = ("-n", "3", "--raw", "--stats-json", "-")
    told = [
        figures(tiny(*flags, prompt="Grüße 🦙")),
        figures(tiny(*flags, "-f", file, prompt=None)),
        figures(tiny(*flags, "-f", "-", prompt=None, stdin=file.read_bytes())),
        figures(tiny(*flags, prompt=None, stdin=file.read_bytes())),
        figures(tiny(*flags, prompt=None, stdin="Grüße 🦙\r\n".encode())),
    ]
    assert {one["prompt_tokens"] for one in told} == {len("Grüße 🦙".encode())}
    assert len({tuple(one["tokens"]) for one in told}) == 1
    assert figures(tiny(*flags, prompt="hi\n"))["prompt_tokens"] == 3
    assert figures(tiny(*flags, prompt=None, stdin=b"hi\n\n"))["prompt_tokens"] == 3


def test_messages_pass_through_the_template(tiny, tiny_model):
    flags = ("-n", "2", "--stats-json", "-")
    frame = len("user\n") + len("\n") + len("assistant\n") + 3  # three control tokens
    assert figures(tiny(*flags))["prompt_tokens"] == frame + 3
    system = figures(tiny(*flags, "-sys", "be kind"))["prompt_tokens"]
    assert system == frame + 3 + len("system\n") + len("be kind") + len("\n") + 2
    without = tiny_model(chat_template=None)
    run = tiny(*flags, model=without)
    assert figures(run)["prompt_tokens"] == 3
    assert "no chat template" in run.err
    run = tiny("-sys", "be kind", model=without)
    assert run.code == 2
    assert run.out == b""


# -- output


def test_a_pipe_gets_the_text_and_nothing_else(tiny):
    run = tiny("-n", "30")
    assert (run.code, run.err) == (0, "")
    told = figures(tiny("-n", "30", "--stats-json", "-"))
    assert run.out.decode() == told["text"]
    plain = tiny("-n", "30", "--spec-type", "none")
    assert len(plain.out.decode()) > 10


def test_no_escape_code_reaches_a_pipe(specli, draft_path):
    """Cases L1: whatever the environment says about colours. The draft writes words, and is quick."""
    command = ("run", "-m", draft_path, "-t", "1", "--temp", "0", "-n", "20", "--stats", "-p", "Say hello.")
    environments = ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm-256color"})
    forced = ({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"CLICOLOR_FORCE": "1"}, {"TTY_COMPATIBLE": "1"})
    runs = [specli(*command, env=env) for env in (*environments, *forced)]
    assert {run.code for run in runs} == {0}
    assert {run.out for run in runs} == {runs[0].out}
    assert len(runs[0].out) > 10
    for run in runs:
        assert b"\x1b" not in run.out
        assert "\x1b" not in run.err
        assert "acceptance" in run.err


def test_stats_go_to_stderr(tiny):
    quiet, loud = tiny("-n", "20"), tiny("-n", "20", "--stats", "--draft-fixed")
    assert loud.out == quiet.out
    assert quiet.err == ""
    for word in ("speculation: active (n-gram, K 3, greedy)", "tok/s", "TTFT", "acceptance", "block efficiency"):
        assert word in loud.err
    off = tiny("-n", "20", "--stats", "--spec-type", "none")
    assert "speculation: off: --spec-type none was given" in off.err


def test_figures_as_json(tiny, tiny_model, tmp_path):
    flags = ("-md", tiny_model(noise=0.1), "--draft-fixed", "-n", "40", "--ignore-eos")
    told = figures(tiny(*flags, "--stats-json", "-"))
    assert set(told) >= KEYS
    assert set(told["time_s"]) >= {"load", "prefill", "draft", "verify", "host"}
    assert len(told["tokens"]) == 40
    assert told["accepted"] <= told["proposed"]
    assert told["acceptance_rate"] == told["accepted"] / told["proposed"]
    assert told["block_efficiency"] * told["rounds"] == pytest.approx(39)
    assert told["finish_reason"] == "length"
    assert (told["seed"], told["verify"], told["speculating"], told["reason"]) == (None, "greedy", True, None)
    file = tmp_path / "figures.json"
    file.write_text("old " * 5000)
    run = tiny(*flags, "--stats-json", file)
    written = strict_json(file.read_bytes())
    assert run.out.decode() == written["text"] == told["text"]
    assert written["tokens"] == told["tokens"]


@pytest.mark.parametrize("n", [0, 1])
def test_undefined_figures_are_null(tiny, n):
    """Cases J5."""
    told = figures(tiny("-n", str(n), "--stats-json", "-"))
    assert len(told["tokens"]) == n
    undefined = ["acceptance_rate", "mean_accepted_length", "block_efficiency", "tpot_ms", "decode_tok_s", "seed"]
    undefined += ["ttft_s", "prompt_tokens"] if n == 0 else []
    assert {name: told[name] for name in undefined} == dict.fromkeys(undefined)
    assert told["per_position_acceptance"] == []
    summary = tiny("-n", str(n), "--stats").err
    assert "n/a" in summary
    assert "nan" not in summary
    assert "inf" not in summary


def test_speculation_that_is_off_is_told_in_json(tiny, tiny_model):
    """Cases D10."""
    run = tiny("-n", "5", "--stats-json", "-", model=tiny_model("mamba"))
    told = figures(run)
    assert told["speculating"] is False
    assert told["reason"] in run.err
    assert run.err.startswith("speculation off: ")
    assert run.err.count("\n") == 1


def test_the_log_of_llama_cpp_goes_to_stderr(tiny):
    run = tiny("-n", "20", "-v")
    assert run.out == tiny("-n", "20").out
    assert "general.architecture" in run.err


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict", "LC_ALL": "C"},
        {"PYTHONUNBUFFERED": "1"},
    ],
)
def test_output_is_utf_8_whatever_the_locale(tiny, env):
    """Cases L9."""
    reference = tiny("-n", "40", "--stats")
    assert not reference.out.isascii()
    run = tiny("-n", "40", "--stats", env=env)
    assert run.code == 0, run.err
    assert run.out == reference.out
    assert "block efficiency" in run.err


def test_arguments_and_paths_may_be_any_language(tiny, tiny_model, tmp_path):
    """Cases L6."""
    folder = tmp_path / "モデル"
    folder.mkdir()
    model = folder / "маленькая 🦙.gguf"
    model.write_bytes(tiny_model().read_bytes())
    flags = ("-n", "3", "--raw", "--stats-json", "-")
    told = [figures(tiny(*flags, prompt="Напиши", model=model, env=env)) for env in ({}, {"LC_ALL": "C"})]
    assert told[0]["prompt_tokens"] == told[1]["prompt_tokens"] == len("Напиши".encode())
    assert told[0]["tokens"] == told[1]["tokens"]


# -- streams that go away (cases L3)


@POSIX
@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("flags", [(), ("--stats",), ("--spec-type", "none")])
def test_a_reader_that_leaves_ends_it_in_silence(specli, tiny_model, env, flags):
    endless = ("-n", "-1", "-c", "60000", "--ignore-eos")
    with specli.start(
        "run", "-m", tiny_model(), "-t", "1", "--temp", "0", "-p", "abc", *endless, *flags, env=env
    ) as process:
        assert len(process.stdout.read(10)) > 0
        process.stdout.close()
        assert process.wait(HANG_S) == 141
        assert process.stderr.read() == b""


@POSIX
@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",), ()])
def test_help_into_a_closed_pipe_is_silent(specli, arguments):
    assert into_closed_pipe(specli, *arguments) == (141, b"")


@POSIX
def test_json_into_a_closed_pipe_is_silent(specli, tiny_model):
    command = ("run", "-m", tiny_model(), "-t", "1", "-p", "hi", "-n", "3", "--stats-json", "-")
    assert into_closed_pipe(specli, *command) == (141, b"")


def into_closed_pipe(specli: CommandLine, *arguments) -> tuple[int, bytes]:
    """Exit code and stderr where nobody reads stdout from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    with specli.start(*arguments, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate(timeout=HANG_S)
        return process.returncode, err


@POSIX
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(specli, tiny_model, tmp_path, closed):
    """And no file that specli opens takes the place of one."""
    out, told = tmp_path / "out", tmp_path / "figures.json"
    command = ("run", "-m", str(tiny_model()), "-t", "1", "--temp", "0", "-p", "hi", "-n", "12", "--stats", "-v")
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *specli.argv(*command, "--stats-json", str(told))]
    with out.open("wb") as stdout:
        done = subprocess.run(
            shell,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=specli.environment(),
            cwd=specli.home,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    written = strict_json(told.read_bytes())
    assert out.read_text("utf-8") == ("" if ">&-" in closed.replace("2>&-", "") else written["text"])
    assert b"Traceback" not in done.stderr


@POSIX
def test_a_reader_of_stderr_that_leaves_costs_nothing(specli, tiny_model, tiny):
    reader, writer = os.pipe()
    os.close(reader)
    command = ("run", "-m", tiny_model(), "-t", "1", "--temp", "0", "-p", "abc", "-n", "20", "--stats")
    with specli.start(*command, stderr=writer) as process:
        os.close(writer)
        out, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0
        assert out == tiny("-n", "20").out


# -- Ctrl-C (cases L4)


def run_python(specli: CommandLine, script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=specli.environment(),
        timeout=HANG_S,
        check=False,
    )


@POSIX
@pytest.mark.parametrize("module", ["typer", "specli.cli.run"])
def test_ctrl_c_while_modules_are_imported(specli, module):
    """No traceback from half an import: the signal ends the process, which a shell reports as 130."""
    script = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from specli.__main__ import main
main()
"""
    done = run_python(specli, script, "run", "-p", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@POSIX
def test_the_second_ctrl_c_kills(specli):
    script = """
import os, signal
from specli.cli.interrupt import Interrupt
with Interrupt() as interrupt:
    assert not interrupt.requested
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupt.requested and interrupt()
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not any more", flush=True)
"""
    done = run_python(specli, script)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"still here\n", b"")


@POSIX
def test_ctrl_c_while_generating_keeps_the_text_so_far(specli, tiny_model, tiny, tmp_path):
    endless = ("-n", "-1", "-c", "60000", "--ignore-eos")
    told = tmp_path / "figures.json"
    with specli.start(
        *("run", "-m", tiny_model(), "-t", "1", "--temp", "0", "-p", "abc"), *endless, "--stats-json", told
    ) as process:
        out = b""
        while len(out) < 60:
            out += process.stdout.read(100)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=HANG_S)
        out += rest
        assert (process.returncode, err) == (130, b"")
        figures = strict_json(told.read_bytes())
        assert figures["finish_reason"] == "cancelled"
        assert figures["text"].encode() == out
        whole = tiny("-n", "150", "-c", "60000", "--ignore-eos").out
        common = min(len(whole), len(out)) - 8  # the last character may be unfinished
        assert common > 20
        assert out[:common] == whole[:common]


@POSIX
@pytest.mark.model
def test_ctrl_c_while_loading(specli, q4_0_path):
    with specli.start("run", "-m", q4_0_path, "-v", "-p", "Tell me a story.") as process:
        wait_for(process, b"llama_model_loader")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 130
        assert out == b""
        assert b"Traceback" not in err


@POSIX
@pytest.mark.model
def test_ctrl_c_in_a_long_prompt(specli, q4_0_path, tmp_path):
    """7,800 tokens take many times longer than the one batch that it may wait for."""
    told = tmp_path / "figures.json"
    file = tmp_path / "prompt.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 780)
    command = ("run", "-m", q4_0_path, "--spec-type", "none", "-n", "1", "-v")
    short = specli(*command, "-p", "hi")
    assert short.code == 0
    with specli.start(*command, "-f", file, "--stats-json", told) as process:
        for _ in range(short.err.count("set_abort_callback") - 1):  # the last but one: its only batch begins
            wait_for(process, b"set_abort_callback")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (130, b"")
        assert b"Traceback" not in err
        figures = strict_json(told.read_bytes())
        assert (figures["finish_reason"], figures["tokens"], figures["ttft_s"]) == ("cancelled", [], None)


@POSIX
@pytest.mark.model
@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_random_interrupts(specli, q4_0_path, draft_path, drafter):
    """During start, load, prompt, draft, verify, print: 130, what was written is the text's beginning, nothing hangs.

    Seeded moments between the first one that a handler can be there and the end; SPECLI_INTERRUPTS sets how many.
    """
    command = ["run", "-m", q4_0_path, "--spec-type", drafter, "--temp", "0", "-n", "120", "-fa", "on", "-t", "1"]
    command += ["-md", draft_path] if drafter == "draft" else []
    prompt = "Here is a list of animals, one per line: cat, dog, cow. Repeat it three times, then go on. " * 4
    started_s = time.monotonic()
    whole = specli(*command, "-p", prompt)
    took_s = time.monotonic() - started_s
    assert whole.code == 0
    rng, codes = np.random.default_rng(11), []
    for _ in range(int(os.environ.get("SPECLI_INTERRUPTS", "10"))):
        with specli.start(*command, "-p", prompt) as process:
            time.sleep(rng.uniform(0.1, 1.1 * took_s))  # before that the interpreter itself is starting
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=HANG_S)
            codes.append(130 if process.returncode == -signal.SIGINT else process.returncode)  # as a shell has it
            assert whole.out.startswith(out.removesuffix(b"\n")), out
            assert b"Traceback" not in err, err
            assert codes[-1] == 130 or (codes[-1] == 0 and out == whole.out)
    assert codes.count(130) >= len(codes) // 2


@POSIX
@pytest.mark.model
def test_ctrl_c_while_making_a_copy_leaves_none(specli, target_path, tmp_path):
    with specli.start("run", "-p", "hi", "-n", "3", env={"XDG_CACHE_HOME": str(tmp_path)}) as process:
        wait_for(process, b"making a Q4_0 copy")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (130, b"")
        assert b"stopped while making" in err
        assert list(tmp_path.rglob("*.gguf")) == []


def wait_for(process: subprocess.Popen, words: bytes) -> None:
    """Read stderr up to the line that has ``words``."""
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"{words!r} never came")


@POSIX
def test_an_ignored_sigint_stays_ignored(specli, tiny_model):
    """A job in the background of a script: Ctrl-C is not for it."""
    with specli.start(
        *("run", "-m", tiny_model(), "-t", "1", "--temp", "0", "-p", "abc", "-n", "2000", "-c", "4096", "--ignore-eos"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        out = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, err) == (0, b"")
        assert len(out + rest) > 1000


# -- the default pair


@pytest.mark.model
def test_the_default_pair_makes_its_copy_once(specli, target_path, tmp_path):
    command = ("run", "-p", "Say hello.", "--temp", "0", "-n", "8", "--stats-json", "-")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    first, second = specli(*command, env=env), specli(*command, env=env)
    assert "making a Q4_0 copy" in first.err
    assert second.err == ""
    assert figures(first)["tokens"] == figures(second)["tokens"]
    assert figures(second)["speculating"] is True
    assert len(list(tmp_path.rglob("*.gguf"))) == 1
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".part"] == []


@pytest.mark.model
def test_the_default_pair_works_where_no_copy_can_be_kept(specli, target_path, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    run = specli("run", "-p", "Say hello.", "-n", "8", env={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert run.code == 0
    assert "no copy could be kept" in run.err
    assert len(run.out) > 0


@POSIX
@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_the_default_pair_works_on_a_full_disk(specli, target_path, tmp_path):
    import resource

    with specli.start(
        *("run", "-p", "Say hello.", "-n", "8"),
        env={"XDG_CACHE_HOME": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20)),
    ) as process:
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
        assert b"no copy could be kept" in err
        assert len(out) > 0
        assert [path for path in tmp_path.rglob("*") if path.suffix in (".gguf", ".part")] == []


@pytest.mark.parametrize("samplers", ["top_k", "", "temperature;top_k", "penalties;dry;xtc"])
@pytest.mark.parametrize("more", [(), ("--dynatemp-range", "0.5"), ("--mirostat", "2")])
def test_temperature_0_with_any_chain(tiny, samplers, more):
    """Greedy or not, it runs: one rule says which. Without a temperature in the chain it draws, also an end of text."""
    done = tiny("-n", "5", "--ignore-eos", "--samplers", samplers, *more, "--stats-json", "-")
    assert (done.code, done.err) == (0, "")
    assert len(strict_json(done.out)["tokens"]) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--logprobs", "3"), "--logprobs was given without --stats-json"),
        (("--ignore-eos", "--grammar", 'root ::= "a"'), "which says where the text ends"),
        (("--grammar", "root ::= ("), "the grammar is wrong in line 1, column 11"),
        (("--grammar", " "), "got an empty text"),
        (("-j", "{"), "the JSON schema is not JSON"),
        (("-j", "{}", "--grammar", 'root ::= "a"'), "a grammar and a JSON schema were both given"),
        (("-l", "5"), "expected a token id, a sign and a number"),
        (("-l", "5+1e39"), "a number up to 1e30"),
        (("-l", "999999+1"), "the model has 0 to"),
        (("--samplers", "top_k;nucleos"), "--samplers got 'nucleos'"),
        (("--sampler-seq", "kq"), "--sampler-seq got 'q'"),
        (("--samplers", "top_k", "--sampler-seq", "k"), "each is an order"),
        (("--dry-sequence-breaker", ""), "got an empty text"),
        (("--typical", "nan"), "--typical got nan"),
    ],
)
def test_samplers_and_constraints_that_cannot_be_used(tiny, flags, words):
    done = tiny("-n", "3", *flags)
    assert (done.code, done.out) == (2, b"")
    assert words in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["check-tokenizers", "plan", "run"])
def test_control_characters_of_a_file_name_never_reach_the_terminal(specli, tiny_model, tmp_path, command):
    draft = tmp_path / "d\x1b[31mx\x07.gguf"
    draft.write_bytes(tiny_model(noise=0.1).read_bytes())
    more = ("-p", "hi", "-n", "9", "-t", "1", "--stats") if command == "run" else ()
    ended = specli(command, "-m", tiny_model(), "-md", draft, *more)
    assert ended.code in (0, 1), ended.err
    told = ended.err if command == "run" else ended.out.decode()
    assert "␛[31mx␇" in told
    assert "\x1b" not in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_as_what_it_is(specli, tiny_model):
    with Path("/dev/full").open("wb") as full, specli.start("plan", "-m", tiny_model(), stdout=full) as process:
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert err == b"specli: error: the output cannot be written: No space left on device; what is there is not whole\n"
