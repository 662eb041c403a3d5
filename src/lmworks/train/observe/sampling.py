"""Samples during training: completions of the same prompts each time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmworks import jsonl
from lmworks.files import explain_os_errors
from lmworks.model import Transformer
from lmworks.model.generate import SAMPLING, GenerateOptions, generate
from lmworks.progress import console
from lmworks.tokenizer.tokenizer import Tokenizer

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
        prompts = {prompt: ids for prompt, ids in self.prompts.items() if len(ids) + _TOKENS < context}
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
        return self.tokenizer.encode_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)[0]


@contextmanager
def closing_descriptor(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
