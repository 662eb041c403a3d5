"""The one exception that a user can cause and mend."""


class UserError(ValueError):
    """Something the user can put right. The message is one line: what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """
