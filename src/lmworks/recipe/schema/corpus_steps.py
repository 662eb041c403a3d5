"""The steps that a document goes through, in the order of `corpus.steps`.

Each is one node, told apart by `step`. What a step does is in `lmworks.corpus.steps`; here is what a recipe may say about it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.text_steps import Clean, Code, Language, Lines, Math, Pii, Repeats, Rules
from lmworks.recipe.schema.units import Seconds


class Quality(Node):
    """Score each document with a trained classifier (`lmworks corpus classifier`) and drop what scores too low."""

    step: Literal["quality"] = Field("quality", description="which step this is")
    model: str = Field(description="the classifier's file, relative to the recipe")
    threshold: float = Field(
        0.0, ge=0, le=1, description="documents below it are dropped; the quality_threshold of a source takes precedence"
    )
    fact: str = Field("quality", pattern=r"^[a-z][a-z0-9_]*$", description="name of the score, for buckets, reports and later steps")
    sources: tuple[str, ...] = Field((), description="sources that the step applies to; all when empty")


class Rewrite(Node):
    """Have a language model rewrite each text, through an OpenAI-compatible endpoint. Texts leave the machine; answers are kept on disk.

    The rewriting replaces the text, or with `variants` the document stays and so many rewritings are added as documents of their own.
    """

    renamed: ClassVar = {"key_from": "api_key_env"}

    step: Literal["rewrite"] = Field("rewrite", description="which step this is")
    endpoint: str = Field(pattern=r"^https?://", description="base URL, for example http://127.0.0.1:8000/v1")
    model: str = Field(description="name of the model at the endpoint")
    prompt: str = Field(description="prompt; {text} is replaced by the document")
    sources: tuple[str, ...] = Field(min_length=1, description="sources whose documents are rewritten; other documents are unchanged")
    variants: int = Field(0, ge=0, le=100, description="number of rewritings added per document; 0: one rewriting replaces the text")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable with the API key; an endpoint on loopback needs none")
    temperature: float = Field(0.7, ge=0, le=2, description="sampling temperature")
    max_tokens: int = Field(4096, gt=0, description="maximum length of an answer; a document whose answer is truncated is dropped")
    concurrency: int = Field(16, gt=0, description="concurrent requests per process")
    retries: int = Field(
        6, ge=0, description="retries of a request that fails temporarily (429, 5xx, no connection), with exponential backoff"
    )
    timeout: Seconds = Field(Seconds.parse("10 min"), description="time limit of one request")
    cache: str | None = Field(None, description="folder of the answers, relative to the recipe; $LMWORKS_CACHE/rewrites when omitted")

    @model_validator(mode="after")
    def _asks_about_the_text(self) -> Rewrite:
        if "{text}" not in self.prompt:
            raise ValueError("the prompt of the step rewrite does not say where the document goes: write {text} in it")
        if self.variants > 1 and not self.temperature:
            raise ValueError("the step rewrite makes several variants, which are all the same at temperature 0: raise temperature")
        return self


class Python(Node):
    """A step of your own: a function in a Python file."""

    step: Literal["python"] = Field("python", description="which step this is")
    name: str | None = Field(None, description="name of the step in reports; that of the function when omitted")
    file: str = Field(description="the Python file, relative to the recipe")
    function: str = Field(description="takes a `Document`, returns one, or `Drop(reason)`")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


Step = Annotated[
    Clean | Language | Rules | Pii | Lines | Repeats | Code | Math | Quality | Rewrite | Python,
    Field(discriminator="step"),
]
