"""Talking to a model in the terminal; with a pipe as input, each line gets an answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from lmworks.errors import UserError
from lmworks.model.generate import SAMPLING, GenerateOptions
from lmworks.serve.engine import Delta, Engine, PromptTooLong, Request
from lmworks.terminal import Terminal, plain

HELP = """\
/system TEXT      tell the model how to behave (alone: show it; /system - clears it)
/temperature X    0 always takes the likeliest token; 0.7 is livelier (alone: show it)
/reset            forget the conversation
/help             this list
Ctrl-C stops the answer, Ctrl-D leaves"""


@dataclass
class Conversation:
    """What has been said, and how to go on. The oldest exchanges are dropped when the context fills up."""

    engine: Engine
    system: str = ""
    temperature: float = SAMPLING["temperature"]
    min_p: float = SAMPLING["min_p"]
    max_tokens: int | None = None
    seed: int | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    forgotten: int = 0

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Say `text` and stream the answer, which joins the conversation, also when it was stopped halfway.

        Raises `PromptTooLong` if `text` alone, with the system prompt, leaves no room for an answer.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except UserError:
            self.turns.pop()
            raise
        engine = self.engine
        options = GenerateOptions(
            max_new_tokens=engine.room(len(prompt), self.max_tokens),
            temperature=self.temperature,
            min_p=self.min_p,
            stop_ids=engine.vocabulary.stop_ids,
        )
        said = []
        try:
            for event in engine.stream(Request((tuple(prompt),), options, self.seed)):
                if isinstance(event, Delta):
                    said.append(event.text)
                    yield event
        finally:
            self.turns.append({"role": "assistant", "content": "".join(said)})

    def reset(self) -> None:
        self.turns.clear()
        self.forgotten = 0

    def _prompt(self) -> list[int]:
        """The prompt, without the oldest exchanges if a quarter of the context would not stay free for the answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        first = 0
        while True:
            prompt = self.engine.vocabulary.chat_prompt([*system, *self.turns[first:]])
            if first == len(self.turns) - 1 or len(prompt) <= self.engine.context * 3 // 4:
                break
            first += 2
        self.engine.room(len(prompt))  # refuses a message that is too long alone, before anything is forgotten
        del self.turns[:first]
        self.forgotten += first
        return prompt


def command(conversation: Conversation, line: str) -> str:
    """Carry out a line that begins with a slash; return what to tell the user. Raises `UserError` for one that is unknown."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/help":
        return HELP
    if name == "/reset":
        conversation.reset()
        return "The conversation is forgotten."
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
        return f"Temperature: {conversation.temperature:g}"
    raise UserError(f"there is no command {name}; /help lists them")


def chat(conversation: Conversation) -> None:
    """Talk until the input ends. On a pipe a prompt that is too long ends it with a `UserError`; on a terminal it is told."""
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
                out.write(plain(delta.text))  # a model must not move the cursor or retitle the window
                out.flush()
            out.write("\n")
        out.flush()


def _terminal(conversation: Conversation) -> None:
    import readline  # noqa: F401  gives input() editing and history

    console = Terminal()
    engine = conversation.engine
    about = f"  {engine.context:,} tokens of context · /help for commands · Ctrl-D to leave"
    console.print(Text.assemble("\n", (engine.name, "bold"), (about, "dim")))
    if not engine.tuned:
        console.print("This is a base model: it continues text and was not taught to answer.", style="yellow")
    while True:
        try:
            # \001 and \002 tell readline which characters take no room.
            line = input("\n\001\x1b[1;36m\002you ›\001\x1b[0m\002 ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\nCtrl-D leaves", style="dim")
            continue
        try:
            if line.startswith("/"):
                console.print(command(conversation, line), style="dim")
            elif line:
                _answer(console, conversation, line)
        except UserError as error:
            console.print(str(error), style="red")


def _answer(console: Terminal, conversation: Conversation, line: str) -> None:
    before, last, start = conversation.forgotten, None, time.monotonic()
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
        notes.append("cut off: no room for more")
    if conversation.forgotten > before:
        notes.append("the oldest messages no longer fit and were forgotten")
    console.print(" · ".join(notes), style="dim")
