"""The step `rewrite`: each text rewritten by a language model through an OpenAI-compatible endpoint.

Every answer is written to disk under a hash of the whole request before it is used: a run that is killed and resumed pays for no request
twice and gives the same documents. Rewriting is reproducible as long as the folder of answers is kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmworks.corpus.document import Batch, Context, Document, Drop, Outcome, PerDocument, Step, Variants
from lmworks.errors import UserError
from lmworks.io import files
from lmworks.io.files import read_json, write_json
from lmworks.io.masking import mask
from lmworks.io.urls import reveal
from lmworks.recipe.schema.steps import Rewrite

if TYPE_CHECKING:
    import openai

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def rewrite_step(options: Rewrite, context: Context) -> Step:
    """A step that rewrites the documents of the named sources; raises `UserError` without the library or the key."""
    if context.source.name not in options.sources:
        return PerDocument("rewrite", lambda document: document)
    try:
        import openai  # noqa: F401
    except ImportError:
        raise UserError("the step rewrite needs the openai client: pip install 'lmworks[rewrite]'") from None
    return _Rewriter(options, context)


class _Refused(Exception):
    """The endpoint refuses this one request, for example because it is too long."""


class _Rewriter:
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("rewritten_by",)
    statistics: tuple[str, ...] = ()
    name = "rewrite"

    def __init__(self, node: Rewrite, context: Context) -> None:
        self._node = node
        self._answers = context.folder / node.cache if node.cache else cache_directory()
        self._key = os.environ.get(node.api_key_env, "")
        if not self._key and urlsplit(node.endpoint).hostname not in _LOOPBACK:
            raise UserError(f"the step rewrite needs a key for {node.endpoint}: put it into the environment variable {node.api_key_env}")

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        asked = [document for document in batch.documents if "variant_of" not in document.facts]  # variants are not rewritten
        times = range(max(self._node.variants, 1))
        questions = {self._path(document.text, time): document.text for document in asked for time in times}  # equal requests are sent once
        pool = ThreadPoolExecutor(self._node.concurrency)
        try:
            found = dict(zip(questions, pool.map(self._answer, questions, questions.values()), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
        outcomes: list[Outcome] = []
        for document in batch.documents:
            if "variant_of" in document.facts:
                outcomes.append(document)
                continue
            made = [self._outcome(document, found[self._path(document.text, time)]) for time in times]
            outcomes.append(Variants(document, made) if self._node.variants else made[0])
        return outcomes

    def _outcome(self, document: Document, answer: dict[str, Any]) -> Document | Drop:
        text = answer["text"].strip()
        if answer["finish"] == "refused":
            return Drop("rewrite_refused", answer["text"])
        if answer["finish"] == "length":
            return Drop("rewrite_cut", f"longer than {self._node.max_tokens} tokens")
        if not text:
            return Drop("rewrite_empty", f"finish reason {answer['finish']}")
        return document.with_text(text).with_facts(rewritten_by=self._node.model)

    def _path(self, text: str, time: int) -> Path:
        from lmworks.recipe.changes import canonical

        node = self._node
        again = [time] if time else []
        key = hashlib.sha256(canonical([node.model, node.prompt, node.temperature, node.max_tokens, text, *again])).hexdigest()
        return self._answers / key[:2] / f"{key}.json"

    def _answer(self, path: Path, text: str) -> dict[str, Any]:
        if path.exists():
            kept: dict[str, Any] = read_json(path)
            return kept
        try:
            answer = self._ask(text)
        except _Refused as reason:  # not cached: another model or a repaired endpoint may accept it
            return {"text": str(reason), "finish": "refused"}
        write_json(path, answer)
        return answer

    def _ask(self, text: str) -> dict[str, Any]:
        import openai

        node = self._node
        try:
            reply = self._client.chat.completions.create(
                model=node.model,
                messages=[{"role": "user", "content": reveal(node.prompt).replace("{text}", text)}],
                temperature=node.temperature,
                max_tokens=node.max_tokens,
            )
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise _Refused(_line(error)) from None
        except openai.OpenAIError as error:
            raise UserError(
                f"the step rewrite has no answer from {node.endpoint} ({_line(error)}); fix this and run the same command again: "
                f"the answers so far are cached in {self._answers}"
            ) from None
        if not reply.choices:
            return {"text": "", "finish": "nothing"}
        choice = reply.choices[0]
        return {"text": choice.message.content or "", "finish": choice.finish_reason or "stop"}

    @cached_property
    def _client(self) -> openai.OpenAI:
        import openai

        node = self._node
        # its retries use exponential backoff and respect Retry-After
        return openai.OpenAI(
            base_url=reveal(node.endpoint), api_key=self._key or "none", max_retries=node.retries, timeout=float(node.timeout)
        )


def cache_directory() -> Path:
    """The folder of cached answers: $LMWORKS_CACHE/rewrites, otherwise ~/.cache/lmworks/rewrites."""
    return files.cache_directory("rewrites")


def _line(error: Exception) -> str:
    return mask(" ".join(str(error).split()))[:300]
