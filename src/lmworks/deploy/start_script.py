"""The start script of an engine, for a machine with and without containers: every option on a line of its own, after its reason."""

from __future__ import annotations

from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Launch
from lmworks.deploy.quoting import shell_word

SUMS = "model.sha256"
_HEAD = """#!/bin/sh
# Starts the engine. The API key is read from secrets/api_key: it is in no command line.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
"""
_ARGV = """
import json, logging, runpy, sys
key = open(sys.argv.pop(1)).read().strip()
sys.argv += [sys.argv.pop(1), key]
shown = [key, repr(key)[1:-1], json.dumps(key)[1:-1]]
make = logging.getLogRecordFactory()
def without_key(*args, **kwargs):
    record = make(*args, **kwargs)
    try:
        text = record.getMessage()
    except Exception:
        return record
    if any(one in text for one in shown):
        for one in shown:
            text = text.replace(one, "[API key]")
        record.msg, record.args = text, None
    return record
logging.setLogRecordFactory(without_key)
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
"""Gives the key to a Python module as an option: no list of processes shows it, and it is taken out of what the module logs."""
_VERIFY = """# The model is the one that was verified. Reading it takes about a second for each GB; LMWORKS_VERIFY=no leaves it out.
if [ "${{LMWORKS_VERIFY:-yes}}" != no ]; then
  {check} >&2 ||
    {{ echo "the files in $model are not those that this deployment was written for: they are damaged or were changed" >&2; exit 1; }}
fi
"""


def start_script(request: Request, launch: Launch) -> str:
    """The text of start.sh."""
    source = request.source
    path = source.served(launch.gguf)
    lines = [_HEAD, f"model=${{LMWORKS_MODEL:-{shell_word(str(path))}}}\n"]
    check = f'sha256sum --check --quiet "$here/{SUMS}"'
    lines.append(_VERIFY.format(check=f'{check} < "$model"' if path.is_file() else f'(cd -- "$model" && {check})'))
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
