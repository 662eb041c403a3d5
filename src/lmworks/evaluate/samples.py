"""A few completions of fixed prompts, to be read by a person at the journey's end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lmworks.evaluate.replies import ChatTokenizer, chat_prompt

if TYPE_CHECKING:
    from lmworks.model import Transformer

BASE_PROMPTS = ("Fellow citizens of the Senate and the House of Representatives,", "def read_lines(path):\n", "On July 4, 1776,")
CHAT_PROMPTS = (
    "Hello! How are you today?", "What do you like to do on weekends?",
    'How many times does the letter "e" appear in the text: "the green tree"?',
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def samples(model: Transformer, tokenizer: ChatTokenizer, chat: bool, max_new_tokens: int = 48, seed: int = 0) -> list[Sample]:
    """Three completions: of running text, or of questions under the chat template. Drawn at temperature 0.7 with min-p 0.1, the
    settings a person would chat with; the same seed draws the same text."""
    from lmworks.model.generate import GenerateOptions, generate

    prompts = CHAT_PROMPTS if chat else BASE_PROMPTS
    ids = [chat_prompt(tokenizer, prompt) if chat else tokenizer.encode(prompt) for prompt in prompts]
    options = GenerateOptions(max_new_tokens=max_new_tokens, temperature=0.7, min_p=0.1, stop_ids=tuple(tokenizer.stop_ids), seed=seed)
    completions = generate(model, ids, options)
    return [Sample(prompt, tokenizer.decode(out, skip_special=True)) for prompt, out in zip(prompts, completions, strict=True)]
