"""The application and its error boundary: one line on stderr, the documented exit code, no traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from specli import __version__
from specli.cli import arguments
from specli.cli.bench import bench as bench_command
from specli.cli.check_tokenizers import check_tokenizers as check_tokenizers_command
from specli.cli.demo import demo as demo_command
from specli.cli.models_command import app as models_app
from specli.cli.plan import plan as plan_command
from specli.cli.run import run as run_command
from specli.cli.selftest import selftest as selftest_command
from specli.cli.tune import tune as tune_command
from specli.errors import SpecError

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of a program that the signal ended
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="specli",
    help="Exact speculative decoding for GGUF models: faster, never other words.",
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The parser's exceptions live in click or, since Typer 0.26, in Typer itself: find the base through what is public.
_PARSER_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"specli {__version__} (llama-cpp-python {version('llama-cpp-python')})")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Exact speculative decoding for GGUF models: faster, never other words."""


app.command("run")(run_command)
app.command("bench")(bench_command)
app.command("selftest")(selftest_command)
app.command("plan")(plan_command)
app.command("tune")(tune_command)
app.command("demo")(demo_command)
app.add_typer(models_app, name="models")
app.command("check-tokenizers")(check_tokenizers_command)


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
        command = typer.main.get_command(app)
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
    _say(f"specli: error: {' '.join(message.split())}")
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
