"""The steps of `corpus.steps`: the options that a recipe sets, and what they mean. Their functions on documents are in
`corpus/transform/steps.py`.

To add a step, add a subclass of `StepOptions` here and its function there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.units import Bytes, Seconds

RuleSet = Literal["gopher", "c4", "fineweb"]
PiiKind = Literal["email", "ip", "phone", "card", "iban", "secret", "street"]


class StepOptions(Node):
    """The options of one step. A subclass declares `step: Literal["NAME"]` with this default, and its own options."""

    gives_quality: ClassVar[bool] = False
    """Whether the step may set the fact `quality`, which buckets are chosen by."""
    growing: ClassVar[tuple[str, ...]] = ()
    """Options that name files which the step itself writes: their contents do not invalidate its output."""

    step: str = Field(description="which step this is")


class Clean(StepOptions):
    """Normalize Unicode, line ends, unusual spaces and invisible characters."""

    step: Literal["clean"] = Field("clean", description="which step this is")
    mojibake: bool = Field(True, description="repair UTF-8 that was once decoded as something else, as in `schÃ¶n`")
    exact_code: bool = Field(True, description="leave documents of the domain code unchanged, byte for byte")


class Rules(StepOptions):
    """Drop documents that the quality rules of their domain and language reject (docs/rules.md)."""

    step: Literal["rules"] = Field("rules", description="which step this is")
    sets: tuple[RuleSet, ...] = Field(
        (), description="published rule sets to apply exactly, in this order, instead of the rules of the domain; c4 also drops lines"
    )
    sources: tuple[str, ...] = Field((), description="sources to apply `sets` to; all when empty. Others use the rules of their domain")


class Lines(StepOptions):
    """Drop lines or paragraphs that occurred earlier in the document and, on request, in earlier documents. Code passes."""

    step: Literal["lines"] = Field("lines", description="which step this is")
    unit: Literal["line", "paragraph"] = Field("line", description="unit of comparison; white space and case are ignored")
    within: bool = Field(True, description="drop a unit that occurred earlier in the document")
    across_documents: int | None = Field(
        None, ge=1, description="drop a unit that occurs in this many earlier documents of the same part of the source: boilerplate"
    )
    min_characters: int = Field(20, ge=1, description="shorter units, in characters, are kept")
    sources: tuple[str, ...] = Field((), description="sources to apply the step to; all when empty")


class Repeats(StepOptions):
    """Cut passages that occurred earlier in the same document, such as a whole file; `dedup.substring` compares across documents."""

    step: Literal["repeats"] = Field("repeats", description="which step this is")
    min_words: int = Field(50, ge=16, description="shortest passage to cut, in words (characters where a language has no spaces)")
    max_fraction: float = Field(1.0, gt=0, le=1, description="drop a document of which a larger fraction is repeated")


class Language(StepOptions):
    """Identify the language; drop documents in another language, and those whose language is uncertain. Code passes."""

    step: Literal["language"] = Field("language", description="which step this is")
    min_probability: float = Field(0.65, ge=0, le=1, description="minimum probability of the language found")
    languages: tuple[str, ...] = Field((), description="ISO 639-1 codes to keep; the source's language when empty, any with `assign`")
    assign: bool = Field(False, description="set the document's language to the one found")


class Quality(StepOptions):
    """Score each document with a trained classifier (`lmworks corpus classifier`) and drop documents below a threshold."""

    gives_quality: ClassVar = True

    step: Literal["quality"] = Field("quality", description="which step this is")
    model: str = Field(description="the classifier's file, relative to the recipe")
    threshold: float = Field(0.0, ge=0, le=1, description="drop documents below it; a source's quality_threshold takes precedence")
    fact: str = Field("quality", pattern=r"^[a-z][a-z0-9_]*$", description="name of the score, for buckets, reports and later steps")
    sources: tuple[str, ...] = Field((), description="sources to apply the step to; all when empty")


class Pii(StepOptions):
    """Mask personal data and keys. Documentation examples (example.com, 127.0.0.1, 555-0100) are kept."""

    step: Literal["pii"] = Field("pii", description="which step this is")
    kinds: tuple[PiiKind, ...] = Field(
        ("email", "ip", "phone", "card", "iban", "secret"), description="kinds to mask; street addresses on request, in English only"
    )
    replace: Literal["tag", "made_up"] = Field("tag", description="tag: <EMAIL>; made_up: a value of the same form, equal for equal input")


class Code(StepOptions):
    """Drop code that does not parse and, on request, Python that does not run."""

    step: Literal["code"] = Field("code", description="which step this is")
    max_error_fraction: float = Field(
        0.05, ge=0, le=1, description="largest fraction of bytes inside syntax errors, which macros also cause; Python may have none"
    )
    unknown: Literal["keep", "drop"] = Field("keep", description="what to do with documents in a language without a parser")
    run: bool = Field(False, description="run Python documents in the sandbox and drop those that fail; slow")
    timeout: Seconds = Field(Seconds.parse("5 s"), description="time limit of a run")
    memory: Bytes = Field(Bytes.parse("512MB"), description="memory limit of a run")


class Math(StepOptions):
    """Check the arithmetic in a text: `<<3*4=12>>`, chains such as `3 + 4 = 7`, and the boxed answer against the fact `answer`."""

    step: Literal["math"] = Field("math", description="which step this is")
    wrong: Literal["drop", "count"] = Field("drop", description="what to do with a document with a wrong result")
    chains: bool = Field(True, description="also check plain equations in running text")
    relative_tolerance: float = Field(0.01, ge=0, description="largest relative difference of a rounded result")


class Python(StepOptions):
    """A step of your own: a function in a Python file."""

    gives_quality: ClassVar = True

    step: Literal["python"] = Field("python", description="which step this is")
    name: str | None = Field(None, description="name in the report; the function's name when left out")
    file: str = Field(description="the Python file, relative to the recipe")
    function: str = Field(description="takes a `Document` and returns one, or `Drop(reason)`")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class Rewrite(StepOptions):
    """Have a language model rewrite each text, through an OpenAI-compatible endpoint. Texts leave the machine; answers are cached on disk.

    The rewriting replaces the text. With `variants` the document stays and the rewritings are added as documents.
    """

    growing: ClassVar = ("cache",)

    step: Literal["rewrite"] = Field("rewrite", description="which step this is")
    endpoint: str = Field(pattern=r"^https?://", description="base URL, for example http://127.0.0.1:8000/v1")
    model: str = Field(description="name of the model at the endpoint")
    prompt: str = Field(description="the prompt; {text} is replaced by the document")
    sources: tuple[str, ...] = Field(min_length=1, description="sources whose documents are rewritten; others pass unchanged")
    variants: int = Field(0, ge=0, le=100, description="rewritings to add to each document; 0: one rewriting replaces the text")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable with the API key; an endpoint on loopback needs none")
    temperature: float = Field(0.7, ge=0, le=2, description="sampling temperature")
    max_tokens: int = Field(4096, gt=0, description="longest answer; a document whose answer is longer is dropped")
    concurrency: int = Field(16, gt=0, description="concurrent requests per process")
    retries: int = Field(6, ge=0, description="retries of a request after a temporary failure (429, 5xx, no connection), with backoff")
    timeout: Seconds = Field(Seconds.parse("10 min"), description="timeout of one request")
    cache: str | None = Field(None, description="folder of cached answers, relative to the recipe; $LMWORKS_CACHE/rewrites when left out")

    @model_validator(mode="after")
    def _asks_about_the_text(self) -> Rewrite:
        if "{text}" not in self.prompt:
            raise ValueError("the prompt of the step rewrite has no place for the document: write {text} in it")
        if self.variants > 1 and not self.temperature:
            raise ValueError("the step rewrite makes several variants, which are equal at temperature 0: raise temperature")
        return self


STEPS: dict[str, type[StepOptions]] = {
    get_args(one.model_fields["step"].annotation)[0]: one
    for one in (Clean, Code, Language, Lines, Math, Pii, Python, Quality, Repeats, Rewrite, Rules)
}
"""The value of `step` in a recipe to the options of that step."""

if TYPE_CHECKING:
    AnyStep = StepOptions
else:
    AnyStep: Any = Annotated[Union[tuple(STEPS.values())], Field(discriminator="step")]  # noqa: UP007
