"""How a run that was asked to stop says so."""


class Interrupted(Exception):
    """The work was asked to stop, and everything is saved; the message says how to go on."""
