"""The step `clean`: see `lmworks.corpus.cleaning`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmworks.corpus.document import Document, PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions


class Clean(StepOptions):
    """Normalize Unicode, line ends, unusual spaces and invisible characters."""

    step: Literal["clean"] = Field("clean", description="which step this is")
    mojibake: bool = Field(True, description="repair UTF-8 that was once decoded as something else, as in `schÃ¶n`")
    exact_code: bool = Field(True, description="leave documents of the domain code unchanged, byte for byte")

    def make(self, context: Context) -> Step:
        from lmworks.corpus.cleaning import clean

        def clean_text(document: Document) -> Document:
            if self.exact_code and document.domain == "code":
                return document
            return document.with_text(clean(document.text, self.mojibake))

        return PerDocument("clean", clean_text)
