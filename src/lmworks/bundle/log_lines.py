"""Lines of the log of a rank: tracebacks, warnings and messages of a known form; other lines are counted."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence

from lmworks.bundle.redact import OMITTED, Redactor, public_file

_RANK = re.compile(r"(\[(?:rank|default)\d{1,6}\]:? ?)(.*)")
_HEADER = re.compile(r"([IWEF]\d{4} \d\d:\d\d:\d\d\.\d{1,9}) +(\d{1,10}) +(\S{1,500}):(\d{1,6})\] ((?:\[[^\]\n]{0,60}\] )*)(.*)")
_STAMP = re.compile(r"(\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?[ :,-]*)(.*)")
_LEVEL = re.compile(r"((?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ :-]+)(.*)")
_FRAME = re.compile(r'( {0,8}File )"([^"\n]{1,2000})"(, line \d{1,9})(?:, in (.{1,300}))?')
_WARNING = re.compile(r"(\S{1,1000}\.py):(\d{1,9}): (\w{1,80}Warning): (.*)")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: (.*))?")
_CARETS = re.compile(r"[ ^~]+")
_PUBLIC_ERRORS = re.compile(
    r"(?:torch|numpy|pyarrow|safetensors|lmworks|yaml|pydantic|pydantic_core|json|zipfile|subprocess|multiprocessing|concurrent|asyncio|ray|"
    r"transformers|huggingface_hub|fsspec|botocore|requests|httpx)(?:\.\w+)+"
)
_NAMES = frozenset(name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException))
_OTHER_NAMES = frozenset({
    "UserError", "Unavailable", "DistBackendError", "DistNetworkError", "DistStoreError", "OutOfMemoryError", "ChildFailedError",
    "BrokenProcessPool", "ValidationError", "JSONDecodeError", "BadZipFile", "SafetensorError",
})  # fmt: skip
_JOINED, _SHORTEST_WRAPPED, _WIDTH = 8, 50, 80  # lines of a message that rich has wrapped at the width of a terminal, and their lengths


def redact_log(lines: Sequence[str], redactor: Redactor) -> list[str]:
    """The lines that may be kept, and between them how many were left out."""
    kept: list[str] = []
    omitted = [0, 0]

    def note() -> None:
        if omitted[0]:
            kept.append(f"[{omitted[0]:,} line{'s' if omitted[0] > 1 else ''} of {omitted[1]:,} characters]")
            omitted[:] = [0, 0]

    place = 0
    while place < len(lines):
        taken, text = _redact_from(lines, place, redactor)
        if text is None:
            omitted[0] += 1
            omitted[1] += len(lines[place])
        elif text:
            note()
            kept.append(text)
        place += taken
        if text is not None and text.lstrip().startswith("File ") and place < len(lines) and lines[place].startswith("    "):
            place += 1  # the line of code, which the file and the number of the line say too
            if place < len(lines) and _CARETS.fullmatch(lines[place]):
                place += 1
    note()
    return kept


def _redact_from(lines: Sequence[str], place: int, redactor: Redactor) -> tuple[int, str | None]:
    """How many lines belong to the one at `place`, and what is kept of them."""
    line = lines[place]
    if not line.strip():
        return 1, ""
    if (single := _line(line, redactor)) is not None or not _SHORTEST_WRAPPED <= len(line) <= _WIDTH:
        return 1, single
    for count in range(2, min(_JOINED, len(lines) - place) + 1):
        found = _line(" ".join(one.strip() for one in lines[place : place + count]), redactor)
        if found is not None and OMITTED not in found:
            return count, found
        if not _SHORTEST_WRAPPED <= len(lines[place + count - 1]) <= _WIDTH:
            break
    return 1, None


def _without_prefix(line: str) -> tuple[str, str, str]:
    """The prefix as it is kept, the file that it names, and the message."""
    kept, source = "", ""
    for shape in (_RANK, _STAMP, _LEVEL):
        if found := shape.fullmatch(line):
            kept, line = kept + found[1], found[2]
    if found := _HEADER.fullmatch(line):
        kept, source, line = f"{kept}{found[1]} ", f"{found[3]}:{found[4]}", found[6]
    return kept, source, line


def _line(line: str, redactor: Redactor) -> str | None:
    prefix, source, message = _without_prefix(line)
    if source:
        path, _, number = source.rpartition(":")
        prefix += f"{_code_file(path, redactor)}:{number}] "
    if frame := _FRAME.fullmatch(message):
        name = frame[4] or ""
        public = public_file(frame[2]) is not None
        function = name if public and re.fullmatch(r"[\w.<>]{1,120}", name) else redactor.key(name) if name else ""
        return f'{prefix}{frame[1]}"{_code_file(frame[2], redactor)}"{frame[3]}{f", in {function}" if function else ""}'
    if warning := _WARNING.fullmatch(message):
        return f"{prefix}{_code_file(warning[1], redactor)}:{warning[2]}: {_error(warning[3], redactor)}: {redactor.text(warning[4])}"
    if (exception := _EXCEPTION.fullmatch(message)) and _is_error(exception[1]):
        return f"{prefix}{_error(exception[1], redactor)}" + (f": {redactor.text(exception[2])}" if exception[2] else "")
    if (text := redactor.message(message.strip())) is not None:
        return prefix + text
    return None


def _code_file(path: str, redactor: Redactor) -> str:
    if re.fullmatch(r"<[\w ]{1,40}>", path):
        return path if path in ("<string>", "<stdin>", "<frozen runpy>", "<frozen importlib._bootstrap>") else "<generated>"
    relative = re.fullmatch(r"(?:torch|lmworks)/[\w/]{1,200}\.py", path)
    return path if relative and _installed(path) else redactor.path(path)


def _installed(path: str) -> bool:
    from lmworks.bundle.redact import _public_roots

    return any(public_file(f"{root}/{path}") for root, _ in _public_roots())


def _is_error(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in _NAMES or last in _OTHER_NAMES or bool(re.fullmatch(r"\w*(?:Error|Exception|Warning|Timeout|Interrupt)", last))


def _error(name: str, redactor: Redactor) -> str:
    last = name.rpartition(".")[2]
    if name == last:
        return name if name in _NAMES or name in _OTHER_NAMES else redactor.key(name)
    return name if _PUBLIC_ERRORS.fullmatch(name) else f"{redactor.key(name.rpartition('.')[0])}.{_error(last, redactor)}"
