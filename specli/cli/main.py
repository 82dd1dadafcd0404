"""The application and its error boundary: one line on stderr, the documented exit code, no traceback."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from specli import __version__
from specli.cli import arguments
from specli.errors import SpecError

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of a program that the signal ended
EXIT_INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_ABOUT = "Exact speculative decoding for GGUF models: faster, never other words."
# Each command: the module and name of its function or group, and the summary that `specli --help` shows. Only the
# command that was asked for is imported, so that asking for help costs no more than a bare Typer program.
COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "run": ("run", "run", "Complete a prompt, or chat, faster with a draft, with the target's own words."),
    "serve": ("serve", "serve", "Serve a target and its drafter to OpenAI-compatible clients."),
    "bench": ("bench", "bench", "Measure what speculation does to your model, prompts and machine."),
    "selftest": ("selftest", "selftest", "Prove on your own files and machine that speculation changes nothing."),
    "plan": ("plan", "plan", "Tell whether target and draft fit the memory at hand."),
    "tune": ("tune", "tune", "Measure a pair once, keep the profile, and tell when drafting pays."),
    "demo": ("demo", "demo", "Show what speculation does with two prompts on the default pair."),
    "models": ("models_command", "app", "The pairs that specli knows, and their files."),
    "check-tokenizers": (
        "check_tokenizers",
        "check_tokenizers",
        "Tell whether a draft fits a target, from headers alone.",
    ),
}
# The parser's exceptions live in click or, since Typer 0.26, in Typer itself: find the base through what is public.
_PARSER_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"specli {__version__} (llama-cpp-python {version('llama-cpp-python')})")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _not_imported() -> None:
    """Stands in ``specli --help`` for a command that was not asked for."""


def application(asked: str | None = None) -> typer.Typer:
    """The application with the command ``asked`` for, the others by name only; with all of them when None."""
    app = typer.Typer(
        name="specli",
        help=_ABOUT,
        add_completion=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_ABOUT)(_root)
    for name, (module, attribute, summary) in COMMANDS.items():
        if asked is not None and name != asked:
            app.command(name, help=summary)(_not_imported)
            continue
        command = getattr(importlib.import_module(f"specli.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=summary)
        else:
            app.command(name, short_help=summary)(command)
    return app


def _asked(argv: Sequence[str]) -> str | None:
    """The command that ``argv`` names, "" if none; None when a shell asks for completion, which needs them all."""
    if "_SPECLI_COMPLETE" in os.environ:
        return None
    return next((argument for argument in argv if argument in COMMANDS), "")


def run(argv: Sequence[str]) -> int:
    """Run the command line ``argv`` (without the program's name) and return its exit code."""
    _prepare_streams()
    try:
        return _run(argv)
    finally:
        _settle_streams()


def _run(argv: Sequence[str]) -> int:
    show_traceback = "--debug" in argv
    try:
        command = typer.main.get_command(application(_asked(argv)))
        _check_arguments(command, argv)
        code = command.main(args=list(argv) or ["--help"], prog_name="specli", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except SystemExit as ending:  # how the parser answers a broken pipe, with code 1
        if not isinstance(ending.__context__, BrokenPipeError):
            raise
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.Abort:
        return EXIT_INTERRUPTED
    except _PARSER_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        return _fail(f"{message} (see specli --help)", 2, show_traceback)
    except SpecError as error:
        return _fail(str(error), error.exit_code, show_traceback)
    except Exception as error:  # the boundary: whatever it was, one line and a way to see more
        if isinstance(error, OSError) and error.errno in _FULL:
            cut = f"the output cannot be written: {error.strerror}; what is there is not whole"
            return _fail(cut, 1, show_traceback)
        return _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1, show_traceback)
    return code if isinstance(code, int) else 0


def _check_arguments(command: object, argv: Sequence[str]) -> None:
    start = 0
    while commands := getattr(command, "commands", {}):  # a group, whose next argument names a command or a group
        named = next((i for i, argument in enumerate(argv[start:], start) if argument in commands), None)
        if named is None:
            return
        command, start = commands[argv[named]], named + 1
    for note in arguments.check(argv[start:], getattr(command, "params", [])):
        _say(f"specli: note: {note}")


def _fail(message: str, code: int, show_traceback: bool) -> int:
    if show_traceback:
        _say(traceback.format_exc().rstrip())
    from specli.render.base import one_line

    _say(f"specli: error: {one_line(message)}")
    return code


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return  # stderr is gone: nobody is there to be told


def _prepare_streams() -> None:
    """UTF-8 out whatever the locale says, and file descriptors 0 to 2 open, so that no file can take their place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")


def _settle_streams() -> None:
    """Drop what cannot be written, so that the interpreter's last flush does not change the exit code."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush finds no closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
