"""Entry point of the command line: registers the commands and turns errors into messages and exit codes."""

from __future__ import annotations

from lmworks.cli import start  # isort: skip  # before all that takes time

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NoReturn, TextIO

import typer

from lmworks import __version__
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import is_full_disk
from lmworks.io.masking import mask
from lmworks.ui.exit_codes import ExitCode

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Train language models, from raw text to serving.")
COMPLETE = "_LMWORKS_COMPLETE"  # set by the shell function of `lmworks --show-completion`


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; accepted anywhere in the command.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    machine.overrides()  # an invalid LMWORKS_MACHINE ends every command, not only those that read it


@cache
def command_tree() -> Any:
    """All commands. Typer makes them from the signatures of 60 functions, which takes longer than most commands that only read something,
    and a process that calls several of them does it once."""
    from lmworks.cli import (
        ablate_commands,
        advice_commands,
        bundle_command,
        comparison_commands,
        data_commands,
        deploy_commands,
        doctor_command,
        health_command,
        init_command,
        ladder_commands,
        launch_commands,
        profile_command,
        recipe_commands,
        reference_commands,
        run_commands,
        serve_commands,
    )

    for register in (
        init_command.register,
        run_commands.register, comparison_commands.register, ablate_commands.register, launch_commands.register, recipe_commands.register,
        advice_commands.register, ladder_commands.register, advice_commands.register_preflight, doctor_command.register,
        health_command.register, bundle_command.register, profile_command.register,
        data_commands.register,
        comparison_commands.register_quantize, serve_commands.register, deploy_commands.register, deploy_commands.register_handover,
        reference_commands.register,
    ):  # fmt: skip
        register(app)
    # Not typer's own entry point: it turns Ctrl-C and exit codes into things that differ between its versions.
    return typer.main.get_command(app)


def main() -> None:
    """Entry point. Errors are one line; exit codes are those of `ExitCode`."""
    debug = "--debug" in sys.argv
    try:
        _main(debug)
    except KeyboardInterrupt as stop:
        _fail(stop, start.INTERRUPTED, ExitCode.INTERRUPTED, debug)


def _main(debug: bool) -> None:
    from lmworks.ui.terminal import Interrupted, Preempted

    start.importing()
    try:
        command = command_tree()
    finally:
        start.imported()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # fails for a stream that a rank has redirected from a file to a pipe
                stream.reconfigure(errors="replace")  # a terminal with a limited encoding must not end the command
    if COMPLETE in os.environ:
        command._main_shell_completion({}, "lmworks", COMPLETE)  # ends the process
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = _invoke(command, arguments)
    except Preempted as stop:
        _fail(stop, str(stop), ExitCode.PREEMPTED, debug)
    except Interrupted as stop:
        _fail(stop, str(stop), ExitCode.INTERRUPTED, debug)
    except typer.Abort as stop:
        _fail(stop, start.INTERRUPTED, ExitCode.INTERRUPTED, debug)
    except UserError as error:
        _fail(error, f"error: {error}", ExitCode.USER_ERROR, debug)
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        _discard(sys.stdout)
        code = ExitCode.BROKEN_PIPE
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        code = ExitCode.BROKEN_PIPE  # rich, also that of typer's help, ends the program with 1
    except Exception as error:
        if any(isinstance(one, KeyboardInterrupt) for one in _causes(error)):
            _fail(error, start.INTERRUPTED, ExitCode.INTERRUPTED, debug)
        if hasattr(error, "format_message"):  # an error of the parser; empty if it has printed the help
            from lmworks.cli.habits import answer

            message = error.format_message() and (answer(arguments, command) or error.format_message())
            _fail(error, message and f"error: {message}", ExitCode.USER_ERROR, debug)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if machine.is_out_of_memory(error):
            advice = "close other programs, or use a machine or a device with more memory"
            _fail(error, f"error: memory ran out ({what}); {advice}", ExitCode.USER_ERROR, debug)
        if is_full_disk(error):
            _fail(error, f"error: a disk is full ({what}); free some space there, or write elsewhere", ExitCode.USER_ERROR, debug)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and error.filename is not None:
            advice = "a name has at most 255 bytes; check the path, or give a shorter one"
            _fail(error, f"error: {error.filename}: {error.strerror}; {advice}", ExitCode.USER_ERROR, debug)
        if isinstance(error, PermissionError) and error.filename is not None:
            advice = "ask the owner for the permission, or give another path"
            _fail(error, f"error: {error.filename}: {error.strerror}; {advice}", ExitCode.USER_ERROR, debug)
        if isinstance(error, FileNotFoundError) and str(error.strerror).startswith("No usable temporary directory"):  # of tempfile
            advice = "set TMPDIR to a folder that is writable and not full"
            _fail(error, f"error: there is no folder for temporary files ({what}); {advice}", ExitCode.USER_ERROR, debug)
        if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":  # what pathlib says
            advice = "set HOME, or give paths without ~"
            _fail(error, f"error: HOME is not set, and user ID {os.geteuid()} has no home folder; {advice}", ExitCode.USER_ERROR, debug)
        if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # what threading says for EAGAIN
            advice = "close other programs, or raise the limits of processes (ulimit -u, pids.max of a container) and of memory (ulimit -v)"
            _fail(error, f"error: no thread could be started; {advice}", ExitCode.USER_ERROR, debug)
        _fail(error, f"error: {what} (this is a bug in lmworks; --debug shows the traceback)", ExitCode.BUG, debug)
    if code:
        sys.exit(code)


def _invoke(command: Any, arguments: list[str]) -> int:
    """Run a command, and return its exit code when its output is written. Raises `OSError` if a part of the output cannot be."""
    from lmworks.ui.terminal import Terminal

    code, Terminal.lost = 0, None
    try:
        with command.make_context("lmworks", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as stop:
        code = stop.exit_code
    except Exception as error:
        if (stopped := _stop_behind(error)) is None:
            raise
        raise stopped from error
    sys.stdout.flush()  # what fails later, when Python ends, is answered by nobody
    if Terminal.lost is not None:
        raise Terminal.lost
    return code


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The errors from which one was raised: code that imports or calls back puts its own in the place of a Ctrl-C."""
    while error is not None:
        yield error
        error = error.__cause__


def _stop_behind(error: Exception) -> Exception | None:
    """Of an error in a rank that was asked to stop, which it has from the end of another rank: the stop."""
    if "RANK" not in os.environ:
        return None
    from lmworks.launch.rank import stop_behind

    return stop_behind(error)


def _discard(stream: TextIO) -> None:
    """Have Python not try again at its end to write what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(error: BaseException, message: str, code: ExitCode, debug: bool) -> NoReturn:
    from lmworks.ui.terminal import plain

    with suppress(OSError):  # the exit code is there whoever reads the message
        if debug:
            print(plain(mask("".join(traceback.format_exception(error)))), end="", file=sys.stderr)
        if message:
            print(plain(mask(message)), file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)
    sys.exit(code)


start.imported()

if __name__ == "__main__":
    main()
