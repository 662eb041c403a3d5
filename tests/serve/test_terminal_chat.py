"""Talking in the terminal: commands, pipes, a real terminal, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmworks.cli import serve_commands
from lmworks.errors import UserError
from lmworks.serve import chat
from lmworks.serve.chat import Conversation, command
from lmworks.serve.engine import Engine
from lmworks.serve.models import load_engine
from lmworks.serve.requests import PromptTooLong
from lmworks.ui.terminal import plain
from patience import PATIENCE

LMWORKS = [sys.executable, "-m", "lmworks.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}


def ask(conversation: Conversation, text: str) -> str:
    return "".join(delta.text for delta in conversation.ask(text))


@pytest.fixture
def conversation(engine: Engine) -> Conversation:
    return Conversation(engine, temperature=0, max_tokens=12)


def test_the_model_is_told_the_whole_conversation(conversation: Conversation) -> None:
    conversation.system = "Be brief."
    first = ask(conversation, "One")
    prompt = conversation.engine.vocabulary.chat_prompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"},
         {"role": "assistant", "content": first}, {"role": "user", "content": "Two"}])  # fmt: skip
    asked = []
    original = conversation.engine.stream
    conversation.engine.stream = lambda request: (asked.append(request), original(request))[1]  # type: ignore[method-assign]
    ask(conversation, "Two")
    assert asked[0].prompts == (tuple(prompt),)
    conversation.reset()
    assert ask(conversation, "One") != ""
    assert len(conversation.turns) == 2


def test_the_oldest_exchanges_make_room(conversation: Conversation) -> None:
    for number in range(12):
        ask(conversation, f"{number} and some more words to fill the context")
    assert conversation.dropped > 0
    assert conversation.turns[-2]["content"].startswith("11 ")
    assert conversation.turns[0]["role"] == "user"


def test_a_message_that_is_too_long_changes_nothing(conversation: Conversation) -> None:
    ask(conversation, "One")
    kept = list(conversation.turns)
    with pytest.raises(PromptTooLong, match=r"the prompt has [\d,]+ tokens, and the context of this model is 256; shorten it"):
        ask(conversation, "word " * 600)
    assert conversation.turns == kept
    assert conversation.dropped == 0


def test_an_answer_that_is_stopped_stays_in_the_conversation(conversation: Conversation) -> None:
    answer = conversation.ask("One")
    text = next(answer).text + next(answer).text
    answer.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": text}


def test_commands(conversation: Conversation) -> None:
    assert "Ctrl-D" in command(conversation, "/help")
    assert command(conversation, "/system Be kind. ") == "System prompt: Be kind."
    assert command(conversation, "/system -") == "No system prompt."
    assert command(conversation, "/temperature 1.5") == "Temperature: 1.5"
    conversation.turns.append({"role": "user", "content": "x"})
    command(conversation, "/reset")
    assert conversation.turns == []
    for line in ("/temperature hot", "/temperature 9", "/temperature nan"):
        with pytest.raises(UserError, match="takes a number from 0 to 2"):
            command(conversation, line)
    assert conversation.temperature == 1.5
    with pytest.raises(UserError, match="there is no command /dance; /help lists them"):
        command(conversation, "/dance")


def test_a_model_cannot_drive_the_terminal() -> None:
    assert plain("a\x1b]0;title\x07b\x9b2J\rc\n\td é漢") == "a]0;titleb2Jc\n\td é漢"


def test_a_pipe_gets_one_answer_per_line(run_dir: Path) -> None:
    lines = [b"/temperature 0", b"Hello", b"", b"bad \xff bytes", b"word " * 600, b"never reached"]
    arguments = [*LMWORKS, "chat", str(run_dir), "--max-tokens", "8"]
    done = subprocess.run(arguments, input=b"\n".join(lines), capture_output=True, env=ENVIRONMENT, check=False)
    assert re.fullmatch(r"error: the prompt has [\d,]+ tokens, and the context of this model is 256.*\n", done.stderr.decode()), done.stderr
    assert done.returncode == 2
    engine = load_engine(run_dir)
    expected = Conversation(engine, temperature=0, max_tokens=8)
    answers = [plain(ask(expected, text)) for text in ("Hello", "bad \ufffd bytes")]
    engine.close()
    assert done.stdout.decode() == "\n".join(["Temperature: 0", *answers, ""])


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no Hugging Face folder \(config.json\), GGUF file, checkpoint"):
        load_engine(tmp_path)


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.process, self._fd = self._start(arguments)

    @staticmethod
    def _start(arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
        ours, theirs = pty.openpty()
        # A session of its own makes the terminal its controlling one, so that Ctrl-C arrives as a signal.
        script = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, start_new_session=True)
        os.close(theirs)
        return process, ours

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, pattern: str, key: str = "") -> str:
        """Read until `pattern` appears in what is new; return what came, without colours.

        `key` is pressed now, and every 5 seconds again while nothing comes: a Ctrl-C that arrives
        after readline has shown its line and before it waits for a key is seen only at the next key.
        """
        end, raw = time.monotonic() + PATIENCE, b""
        self.type(key)
        while True:
            new = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x01\x02]", "", raw.decode("utf-8", "replace"))
            if re.search(pattern, new):
                return new
            while not select.select([self._fd], [], [], 5)[0]:
                assert time.monotonic() < end, f"no {pattern!r} in {new!r}"
                self.type(key)
            try:
                raw += os.read(self._fd, 4096)
            except OSError:  # the program has closed the terminal
                raise AssertionError(f"it ended without {pattern!r}: {new!r}") from None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._fd)


# The real command, with a model slowed to 50 tokens a second so that there is time to interrupt it.
SLOWED = """
import time
from lmworks.cli.main import main
from lmworks.serve.engine import Engine
real = Engine._step
def paced(engine):
    time.sleep(0.02)
    return real(engine)
Engine._step = paced
main()
"""


@pytest.fixture
def terminal(run_dir: Path) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-c", SLOWED, "chat", str(run_dir), "--temperature", "1"])
    yield terminal
    terminal.close()


def test_a_terminal(terminal: Terminal) -> None:
    assert "256 tokens of context" in terminal.until("you › ")
    terminal.type("/temperature 0\r")
    terminal.until(r"Temperature: 0\s+you › ")
    terminal.type("Hello\r")
    terminal.until(r"model › \S")
    terminal.type("\x03")  # Ctrl-C stops the answer only
    assert re.search(r"(\d+) tokens, \d+ tokens/s · stopped", terminal.until("you › "))
    terminal.type("word " * 600 + "\r")
    assert re.search(r"has [\d,]+ tokens, and the context\s+of\s+this\s+model\s+is\s+256", terminal.until("shorten(?s:.*)you › "))
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.until(r"Ctrl-D exits(?s:.*)you › ", key="\x03")  # at the prompt Ctrl-C clears the line
    terminal.type("/reset\r")
    terminal.until(r"The conversation was cleared(?s:.*)you › ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=PATIENCE) == 0


def test_the_system_prompt_of_the_command_line_is_that_of_the_conversation(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    begun: list[Conversation] = []
    monkeypatch.setattr("lmworks.serve.models.load_engine", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    monkeypatch.setattr(chat, "chat", begun.append)
    serve_commands.chat(str(tmp_path), system="Be brief.", temperature=0.5, seed=3)
    assert [(one.system, one.temperature, one.seed) for one in begun] == [("Be brief.", 0.5, 3)]
