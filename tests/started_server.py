"""What `lmworks serve` prints until it serves, and how the tests of tools ask it."""

from __future__ import annotations

import re
import subprocess
from typing import Any


def wait_until_served(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The address of a server that a test has started, without a slash at its end, and what it has printed so far."""
    assert process.stdout
    said = ""
    while "Ctrl-C" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    address = re.search(r"chat page +(http://localhost:\d+)/", said)
    assert address, said
    return address[1], said


def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    """The greedy answer of the server's model to messages, through OpenAI's client."""
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=180, **options)
