"""The exception for errors that the user can correct."""

from collections.abc import Callable, Iterable, Iterator

from lmworks.io.masking import mask

_MOST = 4000  # characters of a message, which may quote user input


class UserError(ValueError):
    """An error that the user can correct. The message is one line: what is wrong, where, and what to do; of several arguments one each.

    The command line prints it without a traceback and exits with code 2. Credentials in URLs are masked in every message.
    """

    def __init__(self, *what: object) -> None:
        super().__init__(*(one_line(mask(one)) if isinstance(one, str) else one for one in what))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class Unavailable(UserError):
    """Something that is not available here (no network, no package). Fatal unless what needs it is optional."""


def all_refusals(looks: Iterable[Callable[[], object]]) -> Iterator[UserError]:
    """What each of these calls raises, so that a check names all faults and not the first. A call is made when its refusal is asked for."""
    for look in looks:
        try:
            look()
        except UserError as error:
            yield error


def raise_first(refusals: Iterable[UserError]) -> None:
    """Raise the first of these, if there is one."""
    for refusal in refusals:
        raise refusal


def one_line(text: str) -> str:
    """`text` in one line of limited length; the middle of a longer text is left out."""
    text = " ".join(text.splitlines())
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
