"""The formats of strings in JSON schemas that llguidance knows, as expressions of whole texts: for strings that are written without quotes,
which its own schemas do not describe."""

from __future__ import annotations


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"
    full, open_end = f"(?:{group}:){{7}}{group}", f"(?:{group}:){{1,7}}:"
    inner = [f"(?:{group}:){{1,{before}}}(?::{group}){{1,{7 - before}}}" for before in range(1, 7)]
    return "|".join([full, open_end, *inner, f":(?::{group}){{1,7}}", "::"])


def _duration() -> str:
    time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
    date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    return f"P(?:{date}(?:{time})?|{time}|[0-9]+W)"


def _uri() -> str:
    """RFC 3986. A name of a host may have the form of an IPv4 address."""
    character = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
    host = rf"(?:\[(?:{_ipv6()})\]|(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}})*)"
    user, segments = "(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2})*@", f"(?:/{character}*)*"
    hierarchy = f"//(?:{user})?{host}(?::[0-9]*)?{segments}|/(?:{character}+{segments})?|{character}+{segments}|"
    beyond = f"(?:{character}|[/?])*"
    return rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{hierarchy})(?:\?{beyond})?(?:\#{beyond})?"


_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)  # fmt: skip
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_WORD, _LABEL = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+", "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_SHORT_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _duration(),
    "email": rf"{_WORD}(?:\.{_WORD})*@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "-".join(f"[0-9a-fA-F]{{{size}}}" for size in (8, 4, 4, 4, 12)),
    "uri": _uri(),
}
