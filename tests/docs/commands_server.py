"""Runs `lmworks` commands in children of one process that has imported what they need: most of a small command's time is its imports.

A line of JSON comes in for each command, its exit code goes out. What a command prints goes where the line says.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from unsynced import do_not_wait_for_the_disk

_NEEDED = (
    "transformers", "lmworks.run.runner", "lmworks.run.prediction", "lmworks.corpus", "lmworks.corpus.pipeline",
    "lmworks.tokenizer.train", "lmworks.shards.build",
    "lmworks.train.pretrain", "lmworks.train.stage", "lmworks.evaluate.evaluate", "lmworks.export.export", "lmworks.plan.plan",
    "lmworks.preflight.checks",
)  # fmt: skip


def serve() -> None:
    """Until the input ends."""
    from lmworks.cli.main import command_tree

    command_tree()
    for name in _NEEDED:
        import_module(name)
    do_not_wait_for_the_disk()
    gc.freeze()  # else each child looks at all of it when it ends, which takes a second
    while line := sys.stdin.readline():
        command = json.loads(line)
        if (child := os.fork()) == 0:
            _become(command)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(command: dict[str, Any]) -> None:
    from lmworks.cli.main import main

    os.chdir(command["folder"])
    for number, (path, flags) in enumerate(
        ((command["stdin"], os.O_RDONLY), (command["stdout"], os.O_WRONLY), (command["stderr"], os.O_WRONLY))
    ):
        os.dup2(os.open(path, flags), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = command["words"]
    main()


if __name__ == "__main__":
    serve()
