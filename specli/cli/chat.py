"""``specli run`` as a conversation: turns, commands, and a Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specli.cli.interrupt import Interrupt
from specli.cli.line_input import PROMPT, Lines, PipedLines, TerminalLines, history_path, read_message, silent_typing
from specli.cli.stats_json import StatsJson
from specli.config import GenerationOptions
from specli.errors import ConfigError, ContextOverflow, SpecError
from specli.events import FinishReason, Provenance, Span, Text
from specli.stats import Stats, Totals

if TYPE_CHECKING:
    from specli.conversation import Conversation, Events
    from specli.render.base import Renderer
    from specli.session import Session

PATIENCE = 3  # times that Ctrl-C asks an answer to stop before it kills
HELP = (
    ("/system [TEXT]", 'show or set the system message; "" removes it'),
    ("/regen", "answer the last question again"),
    ("/clear", "forget the conversation, keep the system message"),
    ("/stats", "figures of the last answer and of the conversation"),
    ("/save FILE", "write the conversation: messages as JSON to *.json, else as text"),
    ("/help", "this list"),
    ("/exit, /bye", "leave, as Ctrl-D does"),
    ('a line ending in \\, """', "a message of several lines: \\ goes on, three quotes begin and end it"),
    ("Ctrl-C", "stop the answer; what there is of it stays in the conversation"),
)
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True)
class ChatRequest:
    """What was asked for. ``first``: a message of the command line. ``shows_figures``: one line of them per answer."""

    first: str | None
    system: str | None
    generation: GenerationOptions
    is_single: bool
    json: StatsJson
    shows_figures: bool


def wants_chat(conversation: bool | None, interactive: bool, single_turn: bool, has_prompt: bool, raw: bool) -> bool:
    """Whether the flags, or a terminal on both sides and no prompt, ask for a chat. Raises ``ConfigError``."""
    flags = {"-cnv": bool(conversation), "-i": interactive, "-st": single_turn}
    given = next((flag for flag, is_given in flags.items() if is_given), None)
    if given is not None and conversation is False:
        raise ConfigError(f"{given} was given with -no-cnv, which asks for the opposite; leave one out")
    if given is not None and raw:
        raise ConfigError(f"{given} was given with --raw, which completes a text; leave one out")
    is_person = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    return given is not None or (conversation is None and is_person and not has_prompt and not raw)


def chat(session: Session, request: ChatRequest, renderer: Renderer, interrupt: Interrupt) -> FinishReason | None:
    """Talk until the end of the input; why the last answer ended, where it was to be the last or is one of a pipe."""
    from specli.conversation import Conversation

    if request.generation.special:
        renderer.notice("-sp is left out: what is shown is what the conversation holds")
    conversation = Conversation(session, replace(request.generation, special=False), request.system)
    is_person = sys.stdin is not None and sys.stdin.isatty()
    lines: Lines = TerminalLines(interrupt, history_path()) if is_person else PipedLines(interrupt)
    interrupt.patience = PATIENCE
    renderer.close()  # the loading bar
    return _Chat(session, conversation, request, renderer, interrupt, lines).run()


class _Chat:
    def __init__(
        self,
        session: Session,
        conversation: Conversation,
        request: ChatRequest,
        renderer: Renderer,
        interrupt: Interrupt,
        lines: Lines,
    ) -> None:
        self._session, self._conversation, self._request = session, conversation, request
        self._renderer, self._interrupt, self._lines = renderer, interrupt, lines
        self._last = Stats()
        self._totals = Totals()
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "regen": self._regen,
            "clear": self._clear,
            "stats": self._stats,
            "save": self._save,
            "help": self._help,
            "?": self._help,
        }

    def run(self) -> FinishReason | None:
        if self._goes_on:
            self._greet()
        if (first := self._request.first) is not None:
            if self._goes_on:
                self._say(f"{PROMPT}{first}")
            self._ask(first)
        while not self._is_over and (text := self._read()) is not None:
            command = _COMMAND.fullmatch(text.rstrip())
            if command is None:
                self._ask(text)
            elif (name := command[1].lower()) in ("exit", "bye", "quit"):
                break
            else:
                self._obey(name, (command[2] or "").strip())
        return None if self._goes_on else self._last.finish_reason

    @property
    def _goes_on(self) -> bool:
        """Whether a person is there who may say more after an interrupt or an error."""
        return self._lines.is_terminal and not self._request.is_single

    @property
    def _is_over(self) -> bool:
        if self._request.is_single:
            return self._totals.turns > 0
        return not self._goes_on and self._last.finish_reason == "cancelled"

    def _greet(self) -> None:
        from specli.render.summary import speculation_line

        self._renderer.notice(speculation_line(self._session.speculation))
        self._renderer.notice("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")

    def _read(self) -> str | None:
        """The next message that is not blank; None at the end. Ctrl-C drops what was typed."""
        n_interrupts = 0
        while True:
            self._interrupt.reset()
            try:
                text = read_message(self._lines)
            except KeyboardInterrupt:
                n_interrupts += 1
                print(file=sys.stdout if sys.stdout.isatty() else sys.stderr)
                if n_interrupts > 1:
                    self._say("Ctrl-D or /exit leaves")
                continue
            except ConfigError as error:
                if not self._lines.is_terminal:
                    raise
                self._say(f"error: {error}")
                continue
            if text is None or text.strip():
                return text
            n_interrupts = 0

    # -- answers

    def _ask(self, question: str) -> None:
        self._answer(self._conversation.ask(question, time.perf_counter()), question)

    def _answer(self, events: Events, question: str | None) -> None:
        """Show one answer. What goes wrong with it is told, and the chat goes on."""
        renderer = self._renderer
        stats, parts = Stats(load_s=self._session.load_s), list[str]()
        try:
            with silent_typing(self._interrupt), closing(events):
                for event in events:
                    stats.observe(event)
                    renderer.on_event(event, stats)
                    if isinstance(event, Text):
                        parts.append(event.text)
        except SpecError as error:
            renderer.close()
            if not self._goes_on:
                raise
            self._say(f"error: {error}" + (" (/clear starts anew)" if isinstance(error, ContextOverflow) else ""))
            return
        self._last = stats
        self._totals.add(stats)
        text = "".join(parts)
        if text and not text.endswith("\n") and not sys.stdout.isatty() and not self._request.is_single:
            renderer.on_event(Text(0, (Span("\n", Provenance.TARGET),)), stats)  # on a pipe, answers are kept apart
        self._tell_end(stats, text)
        seed = self._conversation.seed
        self._request.json.write(self._session, stats, text, seed=seed, turn=self._totals.turns, question=question)

    def _tell_end(self, stats: Stats, text: str) -> None:
        """The line of figures, and what must be known of how the answer ended."""
        if self._request.shows_figures and sys.stdout.isatty() and sys.stderr.isatty():
            from specli.render.status import status_line

            width = shutil.get_terminal_size().columns
            if line := status_line(stats, self._session.speculation, width):
                self._renderer.notice(line)
        n_ctx = self._session.speculation.n_ctx
        if stats.finish_reason == "cancelled" and not text:
            self._say("stopped before the first word: the question is taken back (/regen asks it again)")
        elif stats.fills(n_ctx):
            self._say(f"the context of {n_ctx} tokens is full; /clear starts anew, -c N gives more")

    # -- commands

    def _obey(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            self._say(f"/{name} is not a command; /help lists them (a message may begin with a space and a slash)")
            return
        try:
            command(argument)
        except ConfigError as error:
            self._say(f"error: {error}")

    def _system(self, argument: str) -> None:
        conversation = self._conversation
        if argument:
            conversation.system = None if argument in ('""', "''") else argument
        self._say(f"system: {conversation.system}" if conversation.system else "there is no system message")

    def _regen(self, _argument: str) -> None:
        question = self._conversation.last_question
        if question is not None and self._session.speculation.verify == "greedy":
            self._say("at temperature 0 the answer will be the same")
        self._answer(self._conversation.regenerate(time.perf_counter()), question)

    def _clear(self, _argument: str) -> None:
        self._conversation.clear()
        self._last, self._totals = Stats(), Totals()
        self._say("the conversation is empty" + (", the system message stays" if self._conversation.system else ""))

    def _stats(self, _argument: str) -> None:
        from specli.render.summary import totals_line

        if self._totals.turns:
            self._renderer.show_summary(self._last)
        self._say(totals_line(self._totals))

    def _save(self, argument: str) -> None:
        if not argument:
            raise ConfigError("/save needs a file name")
        try:
            path = Path(argument).expanduser()
            is_taken = path.exists() and path not in self._saved
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a user who is not there
            raise ConfigError(f"{argument[:80]!r} is no file name: {error}") from error
        if is_taken:
            raise ConfigError(f"{path} exists and was not written by this chat; choose another name")
        messages = self._conversation.messages
        if path.suffix.lower() == ".json":
            text = json.dumps([{"role": m.role, "content": m.content} for m in messages], ensure_ascii=False, indent=2)
        else:
            text = "\n".join(f"## {m.role}\n\n{m.content}\n" for m in messages)
        try:
            path.write_text(text.rstrip("\n") + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        self._saved.add(path)
        self._say(f"{len(messages)} messages written to {path}")

    def _help(self, _argument: str) -> None:
        width = max(len(name) for name, _ in HELP)
        for name, meaning in HELP:
            self._say(f"  {name:{width}}  {meaning}")

    def _say(self, line: str) -> None:
        from specli.render.base import visible, write_line

        write_line(sys.stderr, visible(line))
