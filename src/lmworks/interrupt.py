"""Exceptions of a run that stops on request."""


class Interrupted(Exception):
    """The work stopped on request, and everything is saved; the message says how to resume."""


class Preempted(Interrupted):
    """A scheduler requested the stop, with SIGTERM or SIGUSR1; the command exits with `EXIT_CODE`, so that the job is requeued."""

    EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
