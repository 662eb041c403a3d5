"""The start script of an engine, for a machine with and without containers: every option on a line of its own, after its reason."""

from __future__ import annotations

from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Launch
from lmworks.deploy.quoting import shell_word

_HEAD = """#!/bin/sh
# Starts the engine. The API key is read from secrets/api_key: it is in no command line.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
"""
_ARGV = (
    "import runpy, sys; key = open(sys.argv.pop(1)).read().strip(); sys.argv += [sys.argv.pop(1), key]; "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def start_script(request: Request, launch: Launch) -> str:
    """The text of start.sh."""
    source = request.source
    path = source.gguf if launch.program[0] == "llama-server" else source.directory
    lines = [_HEAD, f"model=${{LMWORKS_MODEL:-{shell_word(str(path))}}}\n"]
    kind, name = launch.key
    if kind == "env":
        lines.append(f'{name}=$(cat "$here/secrets/api_key")\nexport {name}\n')
    for flag in launch.flags:
        if flag.env:
            lines.append(f"# {flag.reason}\nexport {flag.name}={shell_word(flag.value or '')}\n")
    program = list(launch.program)
    if kind == "argv":
        module = program[program.index("-m") + 1]
        words = [program[0], "-c", _ARGV.format(module=module)]
        lines.append(f'set -- {" ".join(map(shell_word, words))} "$here/secrets/api_key" {name}\n')
    else:
        lines.append(f"set -- {' '.join(map(shell_word, program))}\n")
    lines.append(f'set -- "$@" {"".join(shell_word(word) + " " for word in launch.model_option)}"$model"\n')
    if kind == "option":
        lines.append(f'set -- "$@" {name} "$here/secrets/api_key"\n')
    for flag in launch.flags:
        if flag.note:
            lines.append(f"# {flag.name}: {flag.reason}\n")
        elif not flag.env:
            value = "" if flag.value is None else f" {shell_word(flag.value)}"
            lines.append(f'# {flag.reason}\nset -- "$@" {flag.name}{value}\n')
    return "".join([*lines, 'exec "$@"\n'])
