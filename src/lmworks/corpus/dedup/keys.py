"""Exact duplicates by key: the normalized text, or the normalized URL."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import numpy as np

from lmworks.corpus.cleaning import comparison_form

_TRACKING = re.compile(
    r"utm_\w+|[a-z]*clid|gad_source|_ga|_gl|_hs\w+|mc_[ce]id|igshid|ref_src|ref_url|spm|share|si|phpsessid|jsessionid|sid|sessionid",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_INDEX = re.compile(r"/(?:index|default)\.(?:html?|php|aspx?|jsp)$", re.IGNORECASE)


def keys_of(forms: Sequence[str]) -> np.ndarray:
    """(D, 2) uint64: 128-bit keys of strings; an empty string has the key 0, which matches nothing."""
    digests = [hashlib.blake2b(form.encode("utf-8", "surrogatepass"), digest_size=16).digest() if form else bytes(16) for form in forms]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def text_keys(texts: Sequence[str]) -> np.ndarray:
    """(D, 2) uint64: keys of texts, equal if they differ only in case and white space."""
    return keys_of([comparison_form(text) for text in texts])


def url_keys(urls: Sequence[str | None]) -> np.ndarray:
    """(D, 2) uint64: keys of normalized URLs; 0 for None."""
    return keys_of([normal_url(url) if url else "" for url in urls])


def normal_url(url: str) -> str:
    """The URL without the parts that do not distinguish pages.

    Removed: scheme, `www.`, default port, user, fragment (unless it is a route, `#!` or `#/`), tracking and session parameters, a trailing
    slash or index page. The host is in lower case, parameters are sorted, escapes are uniform. A string that is not a URL is returned
    stripped.
    """
    url = url.strip()
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return url
    if not host:
        return url
    host = host.removeprefix("www.")
    if port and port != _DEFAULT_PORTS.get(parts.scheme, port if not parts.scheme and port in (80, 443) else None):
        host += f":{port}"
    path = "/".join(quote(unquote(part), safe="~!$&'()*+,;=:@") for part in re.sub(r"/{2,}", "/", parts.path).split("/"))
    path = _INDEX.sub("/", path).rstrip("/")
    query = urlencode(sorted(pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not _TRACKING.fullmatch(pair[0])))
    route = f"#{parts.fragment}" if parts.fragment.startswith(("!", "/")) else ""
    return f"{host}{path}{'?' if query else ''}{query}{route}"


def find_copies(keys_N2: np.ndarray) -> np.ndarray:
    """(P, 2) rows (copy, first row with its key), copies ascending. Rows with the key 0 have no copies.

    On many machines, each takes the rows whose key is in its slice (`in_slice`), and the results are concatenated.
    """
    order = np.argsort(keys_N2[:, 0], kind="stable")  # among equal keys the lowest row is first; half a key distinguishes nearly all
    high, low = keys_N2[order, 0], keys_N2[order, 1]
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & ((high[1:] != 0) | (low[1:] != 0))
    heads = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    found = np.stack((order[again], order[heads[again]]), axis=1)
    return found[np.argsort(found[:, 0])]


def in_slice(keys: np.ndarray, slice_: int, slices: int) -> np.ndarray:
    """(N,) bool: the rows in one of `slices` equal slices of the key space, for (N,) band keys or (N, 2) text keys."""
    return (keys if keys.ndim == 1 else keys[:, 0]) % np.uint64(slices) == np.uint64(slice_)
