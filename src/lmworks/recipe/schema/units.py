"""Quantities with their unit in the type: tokens, bytes, seconds, and durations.

A bare number is a number of tokens where nothing but tokens is meant. Elsewhere it is refused, because 2000 steps and 2000 tokens differ by
a month.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

LARGEST = 10**18
"""The largest whole number, and the largest number of tokens or bytes, that a recipe may have."""
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Of bounded length, since 1e400000000 is a number too, which takes minutes to write out, and a long word takes the square of its length.
_LONGEST = 100
# A comma or an underscore separates thousands only: 1,5B is 1.5B to half of the world.
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,13}|\d{1,3}(?:_\d{3}){1,13}|\d{1,41})"
_NUMBER = re.compile(rf"^\s*({_DIGITS}(?:\.\d{{1,40}})?(?:e[+-]?\d{{1,2}})?)\s*([A-Za-z%]*)\s*([A-Za-z]*)\s*$")


def scaled(prefix: str) -> int:
    """The factor of a prefix: `M` is a million, `Ki` is 1024."""
    return _BINARY.get(prefix) or _DECIMAL[prefix]


def _exact(value: float) -> str:
    """The shortest text that reads back as the same float."""
    return repr(float(value)).removesuffix(".0")


def _split(text: str, example: str) -> tuple[Fraction, str, str]:
    match = _NUMBER.match(text) if len(text) <= _LONGEST else None
    if not match:
        if len(text) <= _LONGEST and _NUMBER.match(dotted := text.replace(",", ".")):
            raise ValueError(f"{text!r} is not a quantity; a comma separates thousands: write {dotted.strip()}")
        raise ValueError(f"{text[:100]!r} is not a quantity; write for example {example}")
    value = Fraction(match[1].replace(",", "").replace("_", ""))
    if value > LARGEST:
        raise ValueError(f"{text!r} is too large; nothing here is more than {LARGEST:.0e}")
    return value, match[2], match[3]


def _whole(value: Fraction, text: str) -> int:
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of units")
    if value > LARGEST:
        raise ValueError(f"{text!r} is too large; nothing here is more than {LARGEST:.0e}")
    return int(value)


class Quantity:
    """Pydantic glue: parse strings, pass own instances through, refuse bare numbers, write `text()` back."""

    example = ""

    @classmethod
    def parse(cls, text: str) -> Any:
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError

    @classmethod
    def _validate(cls, value: Any) -> Any:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise ValueError(f"{value!r} has no unit; write for example {cls.example}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.text()),
        )

    @classmethod
    def forms(cls) -> list[dict[str, Any]]:
        """JSON Schemas of the values that `_validate` takes: an editor completes and checks by them. Texts of a form may still be refused,
        such as half a token."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        examples = [one.strip("'") for one in re.split(", | or ", cls.example)]
        forms = cls.forms()
        return {"examples": examples, "title": cls.__name__} | (forms[0] if len(forms) == 1 else {"anyOf": forms})


_PREFIX = f"({'|'.join(filter(None, sorted(_DECIMAL | _BINARY)))})"


def _written(*units: str) -> dict[str, Any]:
    """The JSON Schema of a number with one of these units, each a regular expression."""
    return {"type": "string", "pattern": rf"^\s*{_DIGITS}(\.\d+)?(e[+-]?\d{{1,2}})?\s*({'|'.join(units)})\s*$"}


class Tokens(Quantity, int):
    """A number of tokens: `15T`, `4Mi`, `131072 tokens`, `131072`."""

    example = "'2.5M tokens' or '15T'"

    @classmethod
    def _validate(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool | cls):
            value = f"{value} tokens"
        if (tokens := super()._validate(value)) < 1:
            raise ValueError(f"{value!r} is too few; write for example {cls.example}")
        return tokens

    @classmethod
    def forms(cls) -> list[dict[str, Any]]:
        return [_written(f"{_PREFIX}?", rf"({_PREFIX}\s+)?tokens?"), {"type": "integer", "minimum": 1}]

    @classmethod
    def parse(cls, text: str) -> Tokens:
        number, first, second = _split(text, cls.example)
        prefix, unit = (first, second) if second else ("", first) if first in ("token", "tokens") else (first, "tokens")
        scale = _BINARY.get(prefix) or _DECIMAL.get(prefix)
        if scale is None or unit not in ("token", "tokens"):
            raise ValueError(f"{text!r} is not a number of tokens; write for example {cls.example}")
        return cls(_whole(number * scale, text))

    def text(self) -> str:
        return f"{int(self)} tokens"


class Bytes(Quantity, int):
    """A number of bytes: `16MB` (decimal), `16MiB` (binary)."""

    example = "'16MB' or '4GiB'"

    @classmethod
    def forms(cls) -> list[dict[str, Any]]:
        return [_written(rf"({_PREFIX}\s*)?B", "bytes?")]

    @classmethod
    def parse(cls, text: str) -> Bytes:
        number, first, second = _split(text, cls.example)
        unit = first + second
        if unit not in ("B", "byte", "bytes") and not unit.endswith("B"):
            raise ValueError(f"{text!r} is not a number of bytes; write for example {cls.example}")
        prefix = "" if unit in ("B", "byte", "bytes") else unit[:-1]
        scale = _BINARY.get(prefix) or _DECIMAL.get(prefix)
        if scale is None:
            raise ValueError(f"{text!r} is not a number of bytes; write for example {cls.example}")
        return cls(_whole(number * scale, text))

    def text(self) -> str:
        return f"{int(self)} bytes"


class Seconds(Quantity, float):
    """A time: `30 s`, `10 min`, `2 h`, `90 days`."""

    example = "'30 s', '10 min' or '2 h'"
    _units = {"s": 1, "sec": 1, "seconds": 1, "min": 60, "minutes": 60, "h": 3600, "hours": 3600, "d": 86400, "days": 86400}

    @classmethod
    def forms(cls) -> list[dict[str, Any]]:
        return [_written(*cls._units)]

    @classmethod
    def parse(cls, text: str) -> Seconds:
        number, first, second = _split(text, cls.example)
        if second or first not in cls._units:
            raise ValueError(f"{text!r} is not a time; write for example {cls.example}")
        if not (seconds := float(number * cls._units[first])):
            raise ValueError(f"{text!r} is no time at all; write for example {cls.example}")
        return cls(seconds)

    def text(self) -> str:
        return f"{_exact(self)} s"


@dataclass(frozen=True, repr=False)
class Duration(Quantity):
    """A stretch of training: `2000 steps`, `1B tokens`, or `2%`: of the phase where it stands in one, else of the stage."""

    value: Fraction
    unit: str
    example = "'2000 steps', '1B tokens' or '2%'"

    @classmethod
    def forms(cls) -> list[dict[str, Any]]:
        return [_written("%", "steps?", rf"({_PREFIX}\s+)?tokens?")]

    @classmethod
    def parse(cls, text: str) -> Duration:
        number, first, second = _split(text, cls.example)
        if first == "%" and not second:
            return cls(number, "%")
        if first in ("step", "steps") and not second:
            return cls(Fraction(_whole(number, text)), "steps")
        if second in ("tokens", "token") or first in ("tokens", "token"):
            return cls(Fraction(Tokens.parse(text)), "tokens")
        raise ValueError(f"{text!r} is not a duration; write for example {cls.example}")

    def tokens(self, *, step_tokens: int, phase_tokens: int) -> int:
        """Length in tokens, given the tokens of one step and of the whole phase."""
        if self.unit == "steps":
            return int(self.value * step_tokens)
        return int(self.value) if self.unit == "tokens" else int(self.value * phase_tokens / 100)

    def steps(self, *, step_tokens: int, phase_tokens: int) -> int:
        """Length in whole optimizer steps, rounded up."""
        return (
            int(self.value) if self.unit == "steps" else -(-self.tokens(step_tokens=step_tokens, phase_tokens=phase_tokens) // step_tokens)
        )

    def interval(self, steps: int, tokens: int) -> int:
        """Steps between two events that happen every so often, in a course of `steps` and `tokens`; at least 1."""
        return max(1, self.before(steps, tokens))

    def before(self, steps: int, tokens: int) -> int:
        """Steps of a course of `steps` and `tokens` before this much of it has passed, rounded up; 0 for nothing."""
        return self.steps(step_tokens=max(1, tokens // max(1, steps)), phase_tokens=tokens)

    def times(self, steps: int, tokens: int) -> int:
        """How often such an event happens in the course, at its last step too."""
        return -(-steps // self.interval(steps, tokens))

    def text(self) -> str:
        number = _exact(float(self.value)) if self.unit == "%" else f"{int(self.value)}"
        return f"{number}%" if self.unit == "%" else f"{number} {self.unit}"

    def __repr__(self) -> str:
        return f"Duration({self.text()!r})"
