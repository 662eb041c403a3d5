"""What a reply states as its answer, found without looking at the right one.

In this order, and the last of its kind:

1. `<answer>...</answer>`,
2. `\boxed{...}` with braces nested to any depth, or `#### ...` (a heading of Markdown is none: it is a number, or the reply's last line),
3. what follows "answer is", "answer:", "result =" and the like on its line, or in the formula that it introduces.

Thoughts are left out first (`without_thoughts`): nothing in them is an answer. A tag may hold a box, and a statement a box. All of it takes
time linear in the reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_MARK = re.compile(
    r"<(?P<a>/?)(?:think|thinking|thoughts?|reasoning|seed:think)>|\[(?P<b>/?)THINK\]|◁(?P<c>/?)think▷"
    r"|<\|(?P<d>begin|end)_of_thought\|>|<\|START_THINKING\|>|(?P<e><\|END_THINKING\|>)",
    re.IGNORECASE,
)
# Of OpenAI's harmony form. Its other channels are thoughts, and calls of tools.
_CHANNEL = re.compile(r"<\|channel\|>(?P<name>\w*)[^<]{0,100}(?:<\|constrain\|>[^<]{0,100})?<\|message\|>")
_MESSAGE_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")


def without_thoughts(reply: str, thinking: bool = False) -> str:
    """A reply without its thoughts, in any of the published forms of markup; thoughts that are not closed hide the rest.

    `thinking`: the prompt has already opened them; a mark that opens them once more at the beginning is none of them. A closing mark alone
    means the same: all before it is thought.
    """
    if _CHANNEL.search(reply):
        return "\n".join(_final_messages(reply)).strip()
    if thinking and (again := _MARK.match(reply.lstrip())) and not _closes(again):
        reply = reply.lstrip()[again.end() :]
    kept: list[str] = []
    depth, at = int(thinking), 0
    for mark in _MARK.finditer(reply):
        closes = _closes(mark)
        if not depth:
            kept.append(reply[at : mark.start()])
        if closes and not depth:
            kept.clear()
        depth, at = max(depth - 1, 0) if closes else depth + 1, mark.end()
    if not depth:
        kept.append(reply[at:])
    return "".join(kept).strip()


def _closes(mark: re.Match[str]) -> bool:
    return any(mark[name] for name in "abc") or mark["d"] in ("end", "END") or mark["e"] is not None


def _final_messages(reply: str) -> Iterator[str]:
    for header in _CHANNEL.finditer(reply):
        if header["name"] == "final":
            end = _MESSAGE_END.search(reply, header.end())
            yield reply[header.end() : end.start() if end else len(reply)]


Mark = Literal["tag", "box", "hashes", "said"]

_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,4}\{|\\[\\{}]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s{1,4}([^\s${}\\]{1,40})")
_HASHES = re.compile(r"#{4,6}[ \t]{0,8}([^\n#]{1,400})")
_NUMERIC = re.compile(r"[-+−$€£ \t\\]{0,6}\.?[0-9][^A-Za-z\n]{0,40}(?:[A-Za-z]+\.?)?\s*$")
_SAID = re.compile(
    r"\b(?:answer|result)\b[*_]{0,4}(?:[ ](?:to|for|of|here|therefore|then|must|should|would|will|thus)\b[^\n.:=?!]{0,60}?)?"
    r"\s{0,20}(?:(?:is|was|be|equals)\b[*_]{0,4}\s{0,20}:?|[:=])"
    r"|^[ \t]{0,8}[*_]{0,4}a {0,4}:|答案\s{0,4}(?:是|为|為|[:：])|\b(?:Antwort ist|réponse est|respuesta es|risposta è|Ответ\s{0,4}:)",
    re.IGNORECASE | re.MULTILINE,
)
_FORMULA = (("\\[", "\\]"), ("$$", "$$"), ("\\(", "\\)"))
_EMPHASIS = re.compile(r"(?<![\w\\)}\]])(_{1,3})(?![\s{_])([^_\n]{1,200})(?<=\S)\1(?![\w{(\\])")  # and no index, as of x_1 or _{5}C_{2}
_HOPE = re.compile(r"\.?\s*I hope (?:it|this|that).{0,40}$", re.IGNORECASE)
_MOST_READ = 100_000  # characters at the end of a reply
_MOST_SAID = 100  # statements at the end of a reply
_LONGEST = 400  # characters of a statement


@dataclass(frozen=True)
class Statement:
    """What a reply states, and by which mark."""

    text: str
    mark: Mark


def statements(reply: str, thinking: bool = False) -> Iterator[Statement]:
    """What the reply states as its answer: a single marked one, or everything that it says is the answer, the last first."""
    text = final_text(reply, thinking)
    if tags := _TAG.findall(text):
        inside = next(_marked(tags[-1]), None)
        yield Statement(inside.text if inside else _unwrapped(tags[-1]), "tag")
        return
    yield from _marked(text)


def stated(reply: str, thinking: bool = False) -> str:
    """The text that a reply states as its answer, without quotes and emphasis around it; the whole reply where it states none."""
    found = next(statements(reply, thinking), None)
    return found.text if found else _unwrapped(final_text(reply, thinking))


def final_text(reply: str, thinking: bool = False) -> str:
    """The end of a reply, without its thoughts and the underscores of Markdown's emphasis."""
    return _EMPHASIS.sub(r"\2", without_thoughts(reply, thinking)[-_MOST_READ:])


def _marked(text: str) -> Iterator[Statement]:
    box, hashes = _last_box(text), _last_hashes(text)
    if box or hashes:
        _, found, mark = max(one for one in (box, hashes) if one)
        yield Statement(_unwrapped(found), "box" if mark == "box" else "hashes")
        return
    for said in reversed(list(_SAID.finditer(text))[-_MOST_SAID:]):
        rest = text[said.end() : said.end() + _LONGEST].lstrip(" \t\n*_:=")
        if rest:
            yield Statement(_unwrapped(_HOPE.sub("", _first_line(rest))), "said")


def _last_box(text: str) -> tuple[int, str, str] | None:
    """The box that begins last and is closed: its position and its contents."""
    found = None
    opened: list[tuple[bool, int]] = []
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            if opened and (one := opened.pop())[0] and (found is None or one[1] > found[0]) and text[one[1] : token.start()].strip():
                found = one[1], text[one[1] : token.start()], "box"
        elif token[0].endswith("{") and token[0] != "\\{":
            opened.append((token[0] != "{", token.end()))
    bare = None
    for match in _BARE_BOX.finditer(text):
        bare = match
    if bare and (found is None or bare.start() > found[0]):
        found = bare.start(1), bare[1].rstrip(".,"), "box"
    return found


def _last_hashes(text: str) -> tuple[int, str, str] | None:
    end = len(text.rstrip())
    for match in reversed(list(_HASHES.finditer(text))[-_MOST_SAID:]):
        if match[1].strip() and (match.end() >= end or _NUMERIC.match(match[1])):
            return match.start(1), match[1], "hashes"
    return None


def _first_line(text: str) -> str:
    """The first line, or the whole formula that begins there."""
    for begin, end in _FORMULA:
        if text.startswith(begin) and (at := text.find(end, len(begin))) > 0:
            inside, rest = text[len(begin) : at], text[at + len(end) :].partition("\n")[0]
            return inside.strip() + (rest if rest.strip(" .,*") else "")
    return text.partition("\n")[0]


def _unwrapped(text: str) -> str:
    """Without white space, emphasis and quotes around a single line."""
    text = text.strip()
    if "\n" not in text:
        text = text.strip("*` ")
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1]
    return text.strip()
