"""How a run that was asked to stop says so."""


class Interrupted(Exception):
    """The work was asked to stop, and everything is saved; the message says how to go on."""


class Preempted(Interrupted):
    """A scheduler asked, with SIGTERM or SIGUSR1; the command ends with `EXIT_CODE`, so that the job is requeued."""

    EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
