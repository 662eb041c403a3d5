"""Chat with a model in the terminal; with a pipe as input, each line is the next message of one conversation, or a command."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from lmworks.errors import UserError
from lmworks.inference.generate import GenerateOptions
from lmworks.serve.engine import Engine
from lmworks.serve.requests import Delta, PromptTooLong, Request
from lmworks.tokenizer.reply import read
from lmworks.ui.terminal import Terminal, plain

HELP = """\
/system TEXT      set the system prompt (without TEXT: show it; /system - clears it)
/temperature X    set the temperature; 0 always takes the most likely token (without X: show it)
/reset            clear the conversation
/help             show this list
Ctrl-C stops the answer, Ctrl-D exits"""


@dataclass
class Conversation:
    """The messages of a chat and its sampling options, by default those of the model. The oldest exchanges are dropped when the context
    fills up."""

    engine: Engine
    system: str = ""
    temperature: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Add `text` as a user message and stream the answer, which is added to the conversation even if it was interrupted.

        Raises `PromptTooLong` if `text` with the system prompt leaves no room for an answer.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except UserError:
            self.turns.pop()
            raise
        engine = self.engine
        words = engine.vocabulary
        room, stops = engine.room(len(prompt), self.max_tokens), words.stop_ids
        options = GenerateOptions(max_new_tokens=room, stop_ids=stops, **self.sampling)
        pieces = []
        try:
            for event in engine.stream(Request((tuple(prompt),), options, self.seed, marks=words.thoughts.marks)):
                if isinstance(event, Delta):
                    pieces.append(event.text)
                    yield event
        finally:
            said = read("".join(pieces), begins=words.state_of_thoughts(prompt), thoughts=words.thoughts)
            thought = {"reasoning_content": said.reasoning} if said.reasoning else {}
            self.turns.append({"role": "assistant", "content": said.content, **thought})

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of the model, with those that were given."""
        given = {"temperature": self.temperature, "min_p": self.min_p}
        return {**self.engine.sampling, **{name: value for name, value in given.items() if value is not None}}

    def reset(self) -> None:
        self.turns.clear()
        self.dropped = 0

    def _prompt(self) -> list[int]:
        """The prompt. The oldest exchanges are dropped so that a quarter of the context is left for the answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        first = 0
        while True:
            prompt = self.engine.vocabulary.chat_prompt([*system, *self.turns[first:]])
            if first == len(self.turns) - 1 or len(prompt) <= self.engine.context * 3 // 4:
                break
            first += 2
        self.engine.room(len(prompt))  # rejects a message that is too long by itself, before anything is dropped
        del self.turns[:first]
        self.dropped += first
        return prompt


def command(conversation: Conversation, line: str) -> str:
    """Run a command, a line that begins with a slash; returns the reply to show. Raises `UserError` if it is unknown."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/help":
        return HELP
    if name == "/reset":
        conversation.reset()
        return "The conversation was cleared."
    if name == "/system":
        if rest:
            conversation.system = "" if rest == "-" else rest
        return f"System prompt: {conversation.system}" if conversation.system else "No system prompt."
    if name == "/temperature":
        if rest:
            try:
                value = float(rest)
            except ValueError:
                value = -1.0
            if not 0 <= value <= 2:
                raise UserError(f"/temperature takes a number from 0 to 2, not {rest!r}")
            conversation.temperature = value
        return f"Temperature: {conversation.sampling['temperature']:g}"
    raise UserError(f"there is no command {name}; /help lists them")


def chat(conversation: Conversation) -> None:
    """Chat until the input ends. A prompt that is too long raises `UserError` on a pipe, and is reported on a terminal."""
    if sys.stdin.isatty():
        _terminal(conversation)
    else:
        _piped(conversation)


def _piped(conversation: Conversation) -> None:
    out = sys.stdout
    for raw in sys.stdin.buffer:
        line = raw.decode("utf-8", "replace").strip()
        if line.startswith("/"):
            out.write(command(conversation, line) + "\n")
        elif line:
            for delta in conversation.ask(line):
                out.write(plain(delta.text))  # without control sequences, with which a model could control the terminal
                out.flush()
            out.write("\n")
        out.flush()


def _terminal(conversation: Conversation) -> None:
    import readline  # noqa: F401  gives input() editing and history

    console = Terminal()
    engine = conversation.engine
    about = f"  {engine.context:,} tokens of context · /help for commands · Ctrl-D to exit"
    console.print(Text.assemble("\n", (engine.name, "bold"), (about, "dim")))
    if not engine.tuned:
        console.print("This is a base model: it continues text and was not trained to answer.", style="yellow")
    while True:
        try:
            # \001 and \002 mark characters of zero width for readline.
            line = input("\n\001\x1b[1;36m\002you ›\001\x1b[0m\002 ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\nCtrl-D exits", style="dim")
            continue
        try:
            if line.startswith("/"):
                console.print(command(conversation, line), style="dim")
            elif line:
                _answer(console, conversation, line)
        except UserError as error:
            console.print(str(error), style="red")


def _answer(console: Terminal, conversation: Conversation, line: str) -> None:
    dropped, last, start = conversation.dropped, None, time.monotonic()
    stopped = False
    answer = conversation.ask(line)
    console.print(Text.assemble(("model ›", "bold green"), " "), end="")
    try:
        for delta in answer:
            last = delta
            console.out(delta.text, end="")
            console.file.flush()
    except PromptTooLong:
        console.print()
        raise
    except KeyboardInterrupt:
        answer.close()
        stopped = True
    seconds = max(time.monotonic() - start, 1e-9)
    console.print()
    notes = []
    if last is not None:
        notes.append(f"{last.generated} tokens, {last.generated / seconds:.0f} tokens/s")
    if stopped:
        notes.append("stopped")
    elif last is not None and last.finish == "length":
        notes.append("cut off: the context is full")
    if conversation.dropped > dropped:
        notes.append("the oldest messages no longer fit and were dropped")
    console.print(" · ".join(notes), style="dim")
