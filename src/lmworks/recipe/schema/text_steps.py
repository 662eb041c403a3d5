"""The steps that look at one text at a time: cleaning, language, rules, personal data, lines, code, mathematics."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.units import Bytes, Seconds

RuleSet = Literal["gopher", "c4", "fineweb"]
PiiKind = Literal["email", "ip", "phone", "card", "iban", "secret", "street"]


class Clean(Node):
    """Repair Unicode, line ends, unusual spaces and invisible characters."""

    step: Literal["clean"] = Field("clean", description="which step this is")
    mojibake: bool = Field(True, description="repair UTF-8 that was once decoded as something else, as in `schÃ¶n`")
    exact_code: bool = Field(True, description="leave documents of the domain code unchanged")


class Language(Node):
    """Identify the language; drop documents in another or an unidentified language. Code is not checked."""

    renamed: ClassVar = {"minimum": "min_probability", "keep": "languages"}

    step: Literal["language"] = Field("language", description="which step this is")
    min_probability: float = Field(0.65, ge=0, le=1, description="minimum probability of the identified language")
    languages: tuple[str, ...] = Field((), description="ISO 639-1 codes to keep; the language of the source when empty, any with `assign`")
    assign: bool = Field(False, description="set the language of the document to the identified one")


class Rules(Node):
    """Drop documents that the quality rules of their domain and language reject (`lmworks.corpus.rules`)."""

    step: Literal["rules"] = Field("rules", description="which step this is")
    sets: tuple[RuleSet, ...] = Field(
        (), description="published rule sets to apply exactly, in this order, instead of the rules of the domain; c4 also drops lines"
    )
    sources: tuple[str, ...] = Field(
        (), description="sources that `sets` applies to; all when empty. Other sources use the rules of their domain"
    )


class Pii(Node):
    """Mask personal data and credentials. Documentation examples (example.com, 127.0.0.1, 555-0100) are kept."""

    step: Literal["pii"] = Field("pii", description="which step this is")
    kinds: tuple[PiiKind, ...] = Field(
        ("email", "ip", "phone", "card", "iban", "secret"),
        description="kinds of data to mask; street addresses only when listed, and in English only",
    )
    replace: Literal["tag", "made_up"] = Field(
        "tag", description="tag: <EMAIL>; made_up: a made-up value of the same form, the same for equal values"
    )


class Lines(Node):
    """Drop lines or paragraphs that occurred before, in the document or optionally in earlier documents. Code is not changed."""

    renamed: ClassVar = {"shortest": "min_length"}

    step: Literal["lines"] = Field("lines", description="which step this is")
    unit: Literal["line", "paragraph"] = Field("line", description="unit of comparison, ignoring white space and case")
    within: bool = Field(True, description="drop a unit that occurred earlier in the document")
    across: int | None = Field(
        None, ge=1, description="drop a unit that occurs in this many earlier documents of the same part of the source: boilerplate"
    )
    min_length: int = Field(20, ge=1, description="shorter units, in characters, are kept")
    sources: tuple[str, ...] = Field((), description="sources that the step applies to; all when empty")


class Repeats(Node):
    """Cut passages that occur earlier in the same document, such as a whole file; `dedup.substring` compares across documents."""

    renamed: ClassVar = {"length": "min_length", "largest": "max_fraction"}

    step: Literal["repeats"] = Field("repeats", description="which step this is")
    min_length: int = Field(50, ge=16, description="minimum length of a passage in words (characters where a language has no spaces)")
    max_fraction: float = Field(1.0, gt=0, le=1, description="a document of which a larger fraction is repeated is dropped")


class Code(Node):
    """Drop code that does not parse, and optionally Python that does not run."""

    renamed: ClassVar = {"errors": "max_error_fraction", "seconds": "timeout"}

    step: Literal["code"] = Field("code", description="which step this is")
    max_error_fraction: float = Field(
        0.05, ge=0, le=1, description="maximum fraction of bytes in syntax errors, which macros cause too; Python may have none"
    )
    unknown: Literal["keep", "drop"] = Field("keep", description="what happens to documents in a language without a parser")
    run: bool = Field(False, description="run Python documents in the sandbox and drop those that fail; slow")
    timeout: Seconds = Field(Seconds.parse("5 s"), description="time limit of a run")
    memory: Bytes = Field(Bytes.parse("512MB"), description="memory limit of a run")


class Math(Node):
    """Check the arithmetic in a text: `<<3*4=12>>`, chains such as `3 + 4 = 7`, and the boxed answer against the fact `answer`."""

    step: Literal["math"] = Field("math", description="which step this is")
    wrong: Literal["drop", "count"] = Field("drop", description="what happens to a document with a wrong result")
    chains: bool = Field(True, description="also check plain equations in running text")
    tolerance: float = Field(0.01, ge=0, description="maximum relative error of a result, since results may be rounded")
