"""The command line: parses, calls one function, prints."""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import suppress
from functools import cache
from typing import Annotated

import typer

from lmworks import __version__, machine
from lmworks.errors import UserError
from lmworks.masking import mask

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Raw text to a language model that people can talk to."
)
_INTERRUPTED = "interrupted; nothing finished was lost, and the same command goes on where it was"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere in the command.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    machine.overrides()  # a wrong word in them ends every command, not only those that ask


@cache
def _register() -> None:
    from lmworks.cli import data_commands, launch_commands, preflight_commands, recipe_commands, run_commands, serve_commands

    for commands in (run_commands, launch_commands, recipe_commands, preflight_commands, data_commands, serve_commands):
        commands.register(app)


def main() -> None:
    """Entry point. A user's fault is one line and exit code 2; a request to stop is one line and 130,
    or 75 if a scheduler made it; a fault of ours one line and 1."""
    from lmworks.interrupt import Interrupted, Preempted

    _register()
    debug = "--debug" in sys.argv
    # Not typer's own entry point: it turns Ctrl-C and exit codes into things that differ between its versions.
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # of a stream that a rank has moved from a file to a pipe
                stream.reconfigure(errors="replace")  # a terminal in an encoding of few characters is no reason to end
    try:
        with command.make_context("lmworks", [argument for argument in sys.argv[1:] if argument != "--debug"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Preempted as stop:
        _fail(stop, str(stop), Preempted.EXIT_CODE, debug)
    except Interrupted as stop:
        _fail(stop, str(stop), 130, debug)
    except (KeyboardInterrupt, typer.Abort) as stop:
        _fail(stop, _INTERRUPTED, 130, debug)
    except UserError as error:
        _fail(error, f"error: {error}", 2, debug)
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's; empty where it has printed the help instead
            _fail(error, error.format_message() and f"error: {error.format_message()}", 2, debug)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        _fail(error, f"error: {what} (this is a fault of lmworks; --debug shows where it happened)", 1, debug)


def _fail(error: BaseException, message: str, code: int, debug: bool) -> None:
    from lmworks.terminal import plain

    if debug:
        print(plain(mask("".join(traceback.format_exception(error)))), end="", file=sys.stderr)
    if message:
        print(plain(mask(message)), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
