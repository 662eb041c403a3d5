"""The step `python`: a function of the user's own, in a file named in the recipe.

    from lmworks.corpus.document import Document, Drop, step

    @step(makes=["digits"], statistics=["digits"])
    def few_digits(document: Document, most: float = 0.3) -> Document | Drop:
        share = sum(map(str.isdigit, document.text)) / max(len(document.text), 1)
        return Drop("digits", f"{share:.0%}") if share > most else document.with_facts(digits=share)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from lmworks.corpus.document import Document, Drop, Outcome, PerDocument, Step, Variants
from lmworks.corpus.steps.base import Context, StepOptions
from lmworks.credentials import reveal
from lmworks.errors import UserError


class Python(StepOptions):
    """A step of your own: a function in a Python file."""

    gives_quality: ClassVar = True

    step: Literal["python"] = Field("python", description="which step this is")
    name: str | None = Field(None, description="name in the report; the function's name when left out")
    file: str = Field(description="the Python file, relative to the recipe")
    function: str = Field(description="takes a `Document` and returns one, or `Drop(reason)`")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")

    def make(self, context: Context) -> Step:
        """Import the file and bind the options. Raises `UserError` for a missing file or function and for options it does not take."""
        path = context.folder / self.file
        function, options = _function(path, self.function), reveal(self.options)
        try:
            inspect.signature(function).bind(None, **options)
        except TypeError as error:
            raise UserError(f"step {self.function} of {path}: {error}; see its arguments after the first") from None
        bound = functools.partial(function, **options)
        declared = getattr(function, "declared", {})

        def checked(document: Document) -> Outcome:
            try:
                outcome = bound(document)
            except UserError:
                raise
            except Exception as error:
                where = f"document {document.id} ({document.origin})"
                raise UserError(f"step {self.function} of {path} failed on {where}: {_one_line(error)}") from error
            if not isinstance(outcome, (Document, Drop, Variants)):
                what = f"returned {type(outcome).__name__} for {document.id}"
                allowed = "a Document, Drop(reason) or Variants(document, [...])"
                raise UserError(f"step {self.function} of {path} {what}; it must return {allowed}")
            return outcome

        return PerDocument(self.name or self.function, checked, **declared)


def _function(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"lmworks_user_step_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"{path} is not a Python file; corpus.steps names it as the file of the step {name!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path}, the file of the step {name!r}, cannot be imported: {_one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{path} has no function {name!r}")
    return getattr(module, name)


def _one_line(error: Exception) -> str:
    """The error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
