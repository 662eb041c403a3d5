"""The steps that look at one text at a time: cleaning, language, rules, personal data, lines, code, mathematics."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.units import Bytes, Seconds

RuleSet = Literal["gopher", "c4", "fineweb"]
PiiKind = Literal["email", "ip", "phone", "card", "iban", "secret", "street"]


class Clean(Node):
    """Mend Unicode, line ends, odd spaces and invisible characters."""

    step: Literal["clean"] = Field("clean", description="which step this is")
    mojibake: bool = Field(True, description="repair UTF-8 that was once decoded as something else, as in `schÃ¶n`")
    exact_code: bool = Field(True, description="leave documents of the domain code as they are, byte for byte")


class Language(Node):
    """Identify the language; drop what is another, or none that can be told. Code passes."""

    renamed: ClassVar = {"minimum": "min_probability", "keep": "languages"}

    step: Literal["language"] = Field("language", description="which step this is")
    min_probability: float = Field(0.65, ge=0, le=1, description="least probability of the language found")
    languages: tuple[str, ...] = Field((), description="ISO 639-1 codes that may stay; the source's language when empty, any with `assign`")
    assign: bool = Field(False, description="the document takes the language that was found")


class Rules(Node):
    """Drop what the quality rules of its domain and language reject (`lmworks.corpus.rules`)."""

    step: Literal["rules"] = Field("rules", description="which step this is")
    sets: tuple[RuleSet, ...] = Field(
        (), description="published rule sets to apply to the letter, in this order, instead of the rules of the domain; c4 also drops lines"
    )
    sources: tuple[str, ...] = Field((), description="sources that `sets` are for; all when empty. Others have their domain's rules")


class Pii(Node):
    """Mask personal data and keys. Documentation examples (example.com, 127.0.0.1, 555-0100) stay."""

    step: Literal["pii"] = Field("pii", description="which step this is")
    kinds: tuple[PiiKind, ...] = Field(
        ("email", "ip", "phone", "card", "iban", "secret"), description="what is masked; street addresses on request, in English only"
    )
    replace: Literal["tag", "made_up"] = Field("tag", description="tag: <EMAIL>; made_up: a value of the same form, the same for the same")


class Lines(Node):
    """Drop lines or paragraphs that were there before, in the document and on request in earlier ones. Code passes: it repeats itself."""

    renamed: ClassVar = {"shortest": "min_length"}

    step: Literal["lines"] = Field("lines", description="which step this is")
    unit: Literal["line", "paragraph"] = Field("line", description="what is compared, blanks and case aside")
    within: bool = Field(True, description="drop a unit that occurred earlier in the document")
    across: int | None = Field(
        None, ge=1, description="drop a unit that this many earlier documents of the same part of the source hold: boilerplate"
    )
    min_length: int = Field(20, ge=1, description="units of fewer characters are left alone")
    sources: tuple[str, ...] = Field((), description="sources it is meant for; all when empty")


class Repeats(Node):
    """Cut passages that stood earlier in the same document, such as a whole file; `dedup.substring` looks across documents."""

    renamed: ClassVar = {"length": "min_length", "largest": "max_fraction"}

    step: Literal["repeats"] = Field("repeats", description="which step this is")
    min_length: int = Field(50, ge=16, description="words in a row (characters where a language has no spaces) from which a passage is cut")
    max_fraction: float = Field(1.0, gt=0, le=1, description="a document of which a larger share is repeated is dropped")


class Code(Node):
    """Drop code that does not parse, and on request Python that does not run."""

    renamed: ClassVar = {"errors": "max_error_fraction", "seconds": "timeout"}

    step: Literal["code"] = Field("code", description="which step this is")
    max_error_fraction: float = Field(
        0.05, ge=0, le=1, description="largest share of bytes inside syntax errors, which macros make, too; in Python any is too much"
    )
    unknown: Literal["keep", "drop"] = Field("keep", description="what becomes of documents in a language without a parser here")
    run: bool = Field(False, description="run Python documents in the sandbox and drop what fails; slow")
    timeout: Seconds = Field(Seconds.parse("5 s"), description="longest run")
    memory: Bytes = Field(Bytes.parse("512MB"), description="most memory of a run")


class Math(Node):
    """Check the arithmetic in a text: `<<3*4=12>>`, chains such as `3 + 4 = 7`, and the boxed answer against the fact `answer`."""

    step: Literal["math"] = Field("math", description="which step this is")
    wrong: Literal["drop", "count"] = Field("drop", description="what happens to a document with a wrong result")
    chains: bool = Field(True, description="also check plain equations in running text")
    tolerance: float = Field(0.01, ge=0, description="a result may be rounded: the largest relative difference")
