"""Completions of the recipe's prompts, to be read by a person: on the way and at the journey's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lmworks.evaluate.replies import ChatTokenizer, chat_prompt

if TYPE_CHECKING:
    from lmworks.model import Transformer


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def samples(
    model: Transformer, tokenizer: ChatTokenizer, prompts: Sequence[str], chat: bool, max_new_tokens: int = 64, seed: int = 0
) -> list[Sample]:  # fmt: skip
    """A completion of each prompt: of running text, or of a question under the chat template. The same seed draws the same text."""
    from lmworks.model.generate import SAMPLING, GenerateOptions, generate

    if not prompts:
        return []
    ids = [chat_prompt(tokenizer, prompt) if chat else tokenizer.encode(prompt) for prompt in prompts]
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, temperature=SAMPLING["temperature"], min_p=SAMPLING["min_p"], stop_ids=tuple(tokenizer.stop_ids),
        seed=seed,
    )  # fmt: skip
    completions = generate(model, ids, options)
    return [Sample(prompt, tokenizer.decode(out, skip_special=True)) for prompt, out in zip(prompts, completions, strict=True)]
