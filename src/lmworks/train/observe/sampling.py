"""Samples during training: completions of the same prompts each time.

The prompts, also those of the evaluation of the base model, are the recipe's, or beginnings of held-out text. Both have room in the context
of the model: prompts of the recipe that have none are refused (`refusals`), and the beginnings are cut to half of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lmworks.errors import UserError
from lmworks.inference.generate import SAMPLING, GenerateOptions, generate
from lmworks.io import jsonl
from lmworks.io.files import explain_os_errors
from lmworks.io.run_layout import corpus_files
from lmworks.model import Transformer
from lmworks.recipe.schema.evaluate import Evaluate
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.ui.terminal import console

_MOST, _LENGTH = 4, 48  # beginnings, one of each domain; characters of each
_LOOKED_AT = 64  # documents of each file


Encode = Callable[[str], Sequence[int]]


def refusals(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[UserError]:
    """Prompts and questions of the recipe after which the model has no room for a token."""
    wanted, context = recipe.evaluate, int(recipe.model.max_position_embeddings or 0)
    own = {"prompts": (wanted.prompts or (), tokenizer.encode)}
    if recipe.later_stages and wanted.questions != Evaluate().questions:  # the default ones are left out where they do not fit
        own["questions"] = (wanted.questions, partial(as_question, tokenizer))
    for key, (texts, encode) in own.items():
        for text in texts:
            if 0 < context <= (count := len(encode(text))):
                yield UserError(
                    f"evaluate.{key}: {text[:_LENGTH]!r} has {count:,} tokens, and the model's context is {context:,}; shorten it"
                )


def as_question(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a user's message in the chat template, after which the model answers."""
    return tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)[0]


def prompts(recipe: Recipe, corpus_dir: Path, encode: Encode) -> tuple[str, ...]:
    """The prompts of `evaluate.prompts`, or by default fixed beginnings of held-out text."""
    if recipe.evaluate.prompts is not None:
        return recipe.evaluate.prompts
    import pyarrow.parquet as pq

    found: dict[str, str] = {}
    most = int(recipe.model.max_position_embeddings or 0) // 2 or _LENGTH
    for path in (path for files in corpus_files(corpus_dir, "validation").values() for path in files):
        batch = next(pq.ParquetFile(path).iter_batches(_LOOKED_AT, columns=["text", "domain"]), None)
        for text, domain in zip(*(batch[name].to_pylist() for name in ("text", "domain")), strict=True) if batch is not None else ():
            if domain not in found and (begin := cut(beginning(text), encode, most)):
                found[domain] = begin
    return tuple(dict.fromkeys(found[domain] for domain in sorted(found)[:_MOST])) or ("The",)


def cut(text: str, encode: Encode, most: int) -> str:
    """The longest beginning of whole words with at most `most` tokens, or of characters if a word has more; empty if one character has."""
    spaces = [at for at, character in enumerate(text) if character.isspace()]
    ends = [len(text), *reversed(spaces), *range(len(text) - 1, 0, -1)]
    return next((text[:end] for end in ends if text[:end].strip() and len(encode(text[:end])) <= most), "")


def beginning(text: str) -> str:
    """The first words of a text, or characters if it has no spaces; empty for a text that is too short to continue."""
    text = text.strip()
    if len(text) < 2 * _LENGTH:
        return ""
    begin = text[: _LENGTH + 1]
    cut = max(begin.rfind(" "), begin.rfind("\n"))
    return begin[:cut] if cut > _LENGTH // 2 else begin[:_LENGTH]


_TOKENS = 32


class Sampler:
    """Appends `{"step", "prompt", "completion"}` lines to a file: continuations of the prompts as running text.

    Ranks that share a model generate together; those with `path` None write nothing.
    """

    def __init__(self, path: Path | None, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.prompts = {prompt: self._encoded(prompt) for prompt in prompts}

    def _encoded(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    def truncate(self, step: int) -> None:
        """Remove the samples of `step` and later, which a run has written after its last checkpoint."""
        if self.path is None:
            return
        with explain_os_errors(self.path), closing_descriptor(jsonl.open_append(self.path)) as fd:
            jsonl.cut_tail(fd, lambda record: record["step"] >= step)

    def write(self, model: Transformer, step: int) -> None:
        """Complete the prompts with the model after `step` steps; the random state of training is not changed."""
        context = int(model.config.max_position_embeddings or 0) or 10**9
        prompts = {prompt: ids for prompt, ids in self.prompts.items() if len(ids) < context}
        if not prompts:
            return
        options = GenerateOptions(
            max_new_tokens=_TOKENS, temperature=SAMPLING["temperature"], min_p=SAMPLING["min_p"], seed=1,
            stop_ids=tuple(self.tokenizer.stop_ids),
        )  # fmt: skip
        completions = generate(model, list(prompts.values()), options)
        if self.path is None:
            return
        texts = [self.tokenizer.decode(ids, skip_special=True) for ids in completions]
        try:
            with closing_descriptor(jsonl.open_append(self.path)) as fd:
                for prompt, text in zip(prompts, texts, strict=True):
                    jsonl.append(fd, {"step": step, "prompt": prompt, "completion": text})
        except OSError as error:  # as on a full disk, about which the next save decides
            console.print(f"the samples of step {step:,} were not written to {self.path}: {error}", style="yellow")


class ChatSampler(Sampler):
    """A `Sampler` whose prompts are user messages in the chat template."""

    def _encoded(self, prompt: str) -> list[int]:
        return as_question(self.tokenizer, prompt)


@contextmanager
def closing_descriptor(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
