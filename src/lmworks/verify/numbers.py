"""Numbers, as people and models write them.

| written                                         | value                                                       |
|-------------------------------------------------|-------------------------------------------------------------|
| `18`, `-18`, `+18`, `18.00`, `.5`, `１８`        | 18, -18, 18, 18, 1/2, 18                                                 |
| `1,234`, `1{,}234`, `1\\,234`, `12,34,567`        | 1234, 1234, 1234, 1234567; `1,2` is a list                               |
| `3/4`, `\\frac{3}{4}`, `\\dfrac34`, `¾`            | 3/4                                                                      |
| `1 1/2`, `1\\frac{1}{2}`, `1½`, `1 and 1/2`      | 3/2                                                                      |
| `1.5e3`, `1.5 \\times 10^{3}`, `1.5 thousand`     | 1500                                                                     |
| `$18`, `\\$18`, `18 €`, `18 dollars`, `18 km/h`   | 18: currencies and units are left out                                    |
| `50%`, `50\\%`, `50 percent`                     | 50, and 1/2 where the other number has no percent sign                   |
| `45^\\circ`, `45°`                               | 45                                                                       |
| `x = 5`, `5 + 3 = 8 dollars`, `10% of 50 = 5`    | 5, 8, 5: the end of an equation                                          |
| `3\\sqrt{2}`, `2^{10}`, `5!`, `2x`, `3 * 4`, `3:2` | none: a part of these is not their value                    |
| `5 to 10`, `3, 4`, `5 feet 6 inches`, `52_8`     | none                                                        |

Only the end of a huge reply is read, and no pattern backtracks over more than a few characters.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from lmworks.verify.marks import final_text, statements

_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,2}(?:,[0-9]{2}){1,6},[0-9]{3}(?![0-9])|[0-9]+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)"
_LATEX_FRACTION = r"\\frac ?(?:\{ ?(?P<top>-?[0-9]{1,60}) ?\}|(?P<top1>[0-9])) ?(?:\{ ?(?P<bottom>[0-9]{1,60}) ?\}|(?P<bottom1>[0-9]))"
_MONEY = r"(?:US\$|USD ?|EUR ?|GBP ?|Rs\.? ?|[$€£¥₹])"
_SIGN = r"(?P<sign>(?<![\w)\]}%.])[-+]|\b(?:minus|negative) )?"
_NUMBER = re.compile(
    rf"{_SIGN}(?:{_MONEY} ?(?P<minus>-)?)?(?:"
    rf"(?:(?P<mixed>[0-9]{{1,15}})(?: and | ?))?{_LATEX_FRACTION}"
    r"|(?P<whole>[0-9]{1,15})(?: and | )(?P<over>[0-9]{1,15})/(?P<under>[0-9]{1,15})(?![0-9]|[.,][0-9])"
    rf"|(?P<digits>{_DECIMAL})(?:/(?P<below>[0-9]{{1,60}})(?!\.[0-9]))?(?:[eE](?P<e>[-+]?[0-9]{{1,3}})(?![0-9.]))?"
    r")"
    r"(?: ?(?:\\times|×|\*|[xX]) ?10 ?\^ ?(?:\{ ?(?P<power>[-+]?[0-9]{1,3}) ?\}|(?P<power1>-?[0-9]{1,3})))?",
    re.IGNORECASE,
)
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf" ?({'|'.join(_SCALES)})\b", re.IGNORECASE)
_PERCENT = re.compile(r" ?(?:%|percent(?:age points?)?\b|pct\b)", re.IGNORECASE)
_DEGREES = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree|°)")
_CURRENCY = re.compile(r" ?(?:[€£¥₹]|\$(?![0-9A-Za-z(\\]))")
# What makes the number before it a part of something else. Words for units may follow a number, single letters that name no unit may not.
_GOES_ON = re.compile(
    r" ?(?:[-+*/×·÷^_√π²³∞±<>≤≥|&]|\*\*)? ?(?:\\(?!text|mathrm|mbox|\)|\]|quad|;|:| )[A-Za-z]+|[√π]|[0-9])"  # an operator and more
    r"|[(\[{]| ?[-+*/×·÷] ?[(\[{]| ?[√π^_±]|!(?=!|$| ?[-+*/^=)}])|:[0-9]|, ?-?[$\\]?[0-9(\\]|;? ?(?:and|or|to) [-$]?[0-9]| out of [0-9]"
    r"|[a-zA-Z](?![a-zA-Z'’])(?<![mgshlLtKCFWVAJNM%])| (?:[b-hj-zB-HJ-Z])(?![\w'’.-])(?<! [mgshlLtKCFWVAJNM])"
    r"| ?[-+*/×·÷] ?[a-zA-Z](?![a-zA-Z])"
    r"| (?:times|plus|minus|squared|cubed|choose|divided by|multiplied by|to the power|over)\b"
    r"| ?(?:ft|feet|foot|hours?|hrs?|h|minutes?|mins?|pounds?|lbs?|years?|yrs?|weeks?|days?|dollars?|meters?|metres?|gallons?|degrees?"
    r"|yards?|miles?|['′]) (?:and )?[0-9]"
)
# What stands before a number and makes it a part of something else.
_BEGAN = re.compile(r"[\\^_√π(\[{|±<>≤≥]|[0-9]|[-+*/×·÷=] ?$|(?:^|[^A-Za-z])[A-Za-z]$")
_IN_FORMULA = re.compile(r" ?(?:\\(?:sqrt|pi|cdot|times)\b|[√π^])|[a-zA-Z](?![a-zA-Z'’])(?<![mgshlLtKCFWVAJNMk])")
_EQUATION = re.compile(  # not beyond a full stop
    r"(?:[-+*/×÷·x()$%, 0-9]|\.(?=[0-9])|(?<= )\.|times|plus|minus|divided by|multiplied by|(?:out )?off?\b){0,100}"
    r"(?:=|\bequals\b|\bis\b) {0,4}",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"^(?:\\?[A-Za-z][A-Za-z_{}0-9'() ]{0,30}?) ?= ?(?=[^=]*$)")
_ABOUT = re.compile(r"^(?:\\approx|\\sim|≈|~|about|approximately|exactly|only|just|around) ?", re.IGNORECASE)
_UNIT = re.compile(
    r" ?(?:(?:[A-Za-zµΩ°]{1,20}(?:[²³]|\^ ?\{? ?[23] ?\}?)?(?: ?/ ?|[ -]| per )?){1,6})?[.,!]? ?$"
)  # of a number that stands alone
_GROUPED = re.compile(r"[-+]?[$€£]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?\.?")  # by spaces, only where nothing else stands
_IN_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = {**dict.fromkeys(map(ord, "−–‒﹣－"), "-"), ord("⁄"): "/"}
_DENIED = re.compile(r"\W{0,4}(?:not|neither)\b", re.IGNORECASE)  # "the answer is not 3, it is 4"
_LONGEST = 400  # characters of a statement
_MOST_DIGITS = 60  # longer ones are not answers


@dataclass(frozen=True)
class Stated:
    """A number as it is written, its value, whether it has a percent sign, and whether the reply states it as the answer (or it is only
    the last number)."""

    text: str
    value: Fraction
    stated: bool = False
    percent: bool = False

    def equals(self, other: Stated) -> bool:
        """Whether both are the same number: exactly, or to the last decimal of one that is written with six or more. `50%` equals `0.5`
        and `50`, whichever stands on the other side."""
        if _near(self, other):
            return True
        if self.percent == other.percent:
            return False
        hundredth = self if self.percent else other
        return _near(Stated(hundredth.text, hundredth.value / 100), other if self.percent else self)


def final_number(reply: str, thinking: bool = False) -> Stated | None:
    """The answer of a reply; None if it has no number, or states an answer that is none."""
    for one in statements(reply, thinking):
        line = _plain(one.text)[:_LONGEST]
        if one.mark == "said" and _DENIED.match(line):
            continue
        if found := _of_statement(line, spoken=one.mark == "said"):
            return found
        if one.mark != "said" or re.search("[0-9]", line):
            return None  # it states something else
    text = _plain(final_text(reply, thinking))
    for match in reversed(list(_NUMBER.finditer(text))):
        if found := _with_scale(match, text, stated=False)[0]:
            before = text[max(0, match.start() - 12) : match.start()]
            inside = re.search(r"(?:[\^_√]|\\sqrt(?:\[[0-9]\])?) ?\{? ?-?$", before)
            return None if inside or _IN_FORMULA.match(text, match.end()) else found
    return None


def number(text: str) -> Stated | None:
    """The value of a text that is a number, with or without a unit, and nothing else: `18`, `-1,234.5`, `$3`, `3 apples`."""
    plain = re.sub(r"^([-+]) ", r"\1", _plain(text).strip().strip("$").strip())
    if len(plain) > _LONGEST:
        return None
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(" ", "")
    plain = _ABOUT.sub("", _ASSIGNED.sub("", plain))
    match = _NUMBER.match(plain)
    if not match:
        return None
    found, end = _with_scale(match, plain, stated=True)
    return found if found and not _GOES_ON.match(plain, end) and _UNIT.match(plain, end) else None


def _near(one: Stated, other: Stated) -> bool:
    if one.value == other.value:
        return True
    decimals = max(_decimals(one.text), _decimals(other.text))
    return decimals >= 6 and abs(one.value - other.value) * 2 * 10 ** min(decimals, _MOST_DIGITS) <= 1


def _decimals(text: str) -> int:
    found = re.search(r"\.([0-9]+)(?![0-9eE^])", text)
    return len(found[1]) if found else 0


def _of_statement(line: str, spoken: bool) -> Stated | None:
    """The number that a statement gives: its first, or the result of the equation that it begins (`5 + 3 = 8 dollars`)."""
    line = line.strip().strip("$").strip()
    if alone := number(line):
        return alone
    line = _ASSIGNED.sub("", line)
    match = _NUMBER.search(line)
    if match is None or _BEGAN.search(line[: match.start()].lstrip("($ ")):
        return None
    while (equation := _EQUATION.match(line, match.end())) and (follows := _NUMBER.match(line, equation.end())):
        match = follows
    found, end = _with_scale(match, line, stated=True)
    rest = line[end:]
    if spoken and rest.startswith("!"):  # ends a sentence
        rest = rest.lstrip("!")
    return None if _GOES_ON.match(rest) else found


def _with_scale(match: re.Match[str], text: str, stated: bool) -> tuple[Stated | None, int]:
    """The number of a match with the words and signs behind it that change its value, and where they end."""
    found, end = _number(match, stated), match.end()
    if found is None:
        return None, end
    value, percent = found.value, False
    while scale := _SCALE.match(text, end):
        value, end = value * _SCALES[scale[1].lower()], scale.end()
    if sign := _PERCENT.match(text, end):
        percent, end = True, sign.end()
    for mark in (_DEGREES, _CURRENCY):
        end = found_mark.end() if (found_mark := mark.match(text, end)) else end
    return Stated(text[match.start() : end].strip(), value, stated, percent), end


def _number(match: re.Match[str], stated: bool) -> Stated | None:
    whole, digits = match["mixed"] or match["whole"] or "0", match["digits"]
    if digits is not None:
        top, bottom = digits.replace(",", ""), match["below"] or "1"
    else:
        top, bottom = match["top"] or match["top1"] or match["over"], match["bottom"] or match["bottom1"] or match["under"]
    exponent = int(match["e"] or 0) + int(match["power"] or match["power1"] or 0)
    if len(top) > _MOST_DIGITS or not int(bottom) or abs(exponent) > _MOST_DIGITS:
        return None
    value = (int(whole) + Fraction(top) / int(bottom)) * Fraction(10) ** exponent
    negative = bool(match["sign"] and match["sign"].strip() != "+") != bool(match["minus"])
    return Stated(match[0].strip(), -value if negative else value, stated)


def _plain(text: str) -> str:
    """Full-width digits, vulgar fractions and the signs for minus and powers as ASCII; LaTeX's spaces and escapes removed."""
    if not text.isascii():
        text = re.sub(r"(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text)
        text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda found: "^{" + found[0].translate(_IN_SUPERSCRIPT) + "}", text)
        text = re.sub(r"(?<=[0-9])[   '’](?=[0-9]{3}(?![0-9]))", "", text)
        text = unicodedata.normalize("NFKC", text)
    text = re.sub(r",\\! {0,4}(?=[0-9]{3})", ",", text)
    text = text.translate(_SIGNS).replace("\\$", "$").replace("\\%", "%").replace("\\!", "").replace("{,}", ",")
    text = re.sub(r"(?<=[0-9)])\*\*(?=[0-9A-Za-z(-])", "^", text).replace("**", "")
    text = re.sub(r"(?<=[0-9])\\[,; ](?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"\\(?:[,;: ]|left\b|right\b|displaystyle\b)", " ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s?\{([^{}]{0,100})\}", r" \1 ", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"\\(?:text|mathrm|mbox)\s*\{|\\[()\[\]]", " ", text).replace("~", " "))
