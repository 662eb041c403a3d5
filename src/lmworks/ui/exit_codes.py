"""The exit codes of all commands, by which scripts and schedulers decide what to do. They are stable: a code never changes its meaning."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code with what it `means`."""

    means: str

    def __new__(cls, value: int, means: str) -> ExitCode:
        one = int.__new__(cls, value)
        one._value_, one.means = value, means
        return one

    OK = 0, "the command did what was asked; for `run`, all stages are done"
    FAILED = 1, "a check or a comparison has a negative result, which is printed: a damaged checkpoint, a failed check, a difference"
    USER_ERROR = 2, "the input is wrong or something is missing; the last line of stderr, `error: ...`, says what to do"
    BUG = 70, "a bug in lmworks, with one line on stderr; `--debug` prints the traceback"
    PREEMPTED = 75, "a scheduler (SIGTERM, SIGUSR1) or a closed terminal (SIGHUP) stopped the run, which has saved; repeat the command"
    INTERRUPTED = 130, "Ctrl-C; finished work is kept, training has saved, and the same command resumes it"
    BROKEN_PIPE = 141, "the reader of the output has closed the pipe, as `head` does"


def table() -> str:
    """The codes as Markdown, for docs/commands.md."""
    rows = [f"| {code.value} | {code.means} |" for code in ExitCode]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
