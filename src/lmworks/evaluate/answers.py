"""What answers cost a model: those of held-out conversations, and those that it gave itself before it was tuned. Both are rows beside the
held-out text, as bits per byte of the answers.

**Held-out conversations.** A conversation is scored as it is trained: rendered by the chat template, with loss on the assistant's tokens
only.

**Its own earlier answers.** Plain text hardly shows that a tuned model has forgotten how to answer: it may predict prose as before, and
answer a question about cooking like the staff of the hotel whose conversations it was tuned on. So the model that tuning starts from
answers `QUESTIONS` greedily, and the bits of these answers are measured for it and for every later model. The difference, per token,
estimates the divergence of the two models on the first one's answers; it judges neither answer.
"""

from __future__ import annotations

import hashlib
import math
from itertools import groupby, pairwise, takewhile
from pathlib import Path

import numpy as np

from lmworks.evaluate.bits_per_byte import ANSWERS, DocumentBits
from lmworks.evaluate.generation.replies import ChatTokenizer, chat_prompt
from lmworks.evaluate.logprobs import LogProbs, Request
from lmworks.evaluate.records import START
from lmworks.io import files, jsonl
from lmworks.io.run_layout import BASE
from lmworks.shards.indexed import IndexedFile
from lmworks.train.data.chat import chat_shards
from lmworks.ui.terminal import bar, console
from lmworks.weights.open import OpenModel

_MOST = 100
"""Conversations of a set. The difference of two models on a hundred has a standard error of about 1% of the cost itself."""


def answer_bits(data: Path, tokenizer: ChatTokenizer, logprobs: LogProbs, context: int, label: str) -> list[DocumentBits]:
    """The bits of the answers of each held-out conversation in `data`, a folder of `build_chat_data`; none where there is no such folder.

    A conversation longer than `context`, and one whose answers have no text, is left out, which is said.
    """
    if not (data / "manifest.json").is_file():
        return []
    there = [(name, ids, mask) for name, prefix in chat_shards(data, "validation")[0].items() for ids, mask in _read(prefix)]
    fitting = [one for one in there if len(one[1]) <= context + 1]
    conversations = [(name, ids, mask) for name, ids, mask in fitting if tokenizer.byte_lengths[ids[mask]].sum()]
    if len(conversations) < len(there):
        long, empty = len(there) - len(fitting), len(fitting) - len(conversations)
        console.print(
            f"{label}: {len(there) - len(conversations)} of {len(there)} conversations are left out: {long} are longer than the context of "
            f"{context:,} tokens, {empty} have no answer with text", style="yellow", soft_wrap=True
        )  # fmt: skip
    requests = [_requests(ids, mask) for _, ids, mask in conversations]
    found = []
    with bar(label, sum(map(len, requests))) as progress:
        nats = iter(logprobs([one for of_conversation in requests for one in of_conversation], progress.advance))
        for (name, ids, mask), own in zip(conversations, requests, strict=True):
            bits = -math.fsum(next(nats) for _ in own) / math.log(2)
            digest, size = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest(), int(tokenizer.byte_lengths[ids[mask]].sum())
            found.append(DocumentBits(digest, f"{ANSWERS}{name}", bits, size, int(mask.sum())))
    return found


def _read(prefix: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, mask) of the first conversations of a shard; the mask is of the ids that are trained."""
    file = IndexedFile(prefix)
    assert file.mask is not None
    starts = file.document_start(np.arange(min(_MOST, file.documents) + 1))
    return [(file.read(start, stop).astype(np.int64), file.mask[start:stop].astype(bool)) for start, stop in pairwise(starts)]


def _requests(ids: np.ndarray, mask: np.ndarray) -> list[Request]:
    """One request per answer, after all that is before it."""
    spans = [[int(at) for at, _ in span] for trained, span in groupby(enumerate(mask), lambda pair: bool(pair[1])) if trained]
    return [(ids[: span[0]].tolist(), ids[span[0] : span[-1] + 1].tolist()) for span in spans if span[0]]


DOMAIN = f"{ANSWERS}as before"
TOKENS = 48
"""Of each answer. SmolLM2-135M-Instruct gives 32 answers of 48 tokens in 10 s on two cores."""

QUESTIONS = (
    "What is the capital of Italy?", "Give me three tips for learning to play the guitar.", "Explain photosynthesis in two sentences.",
    "Write a short poem about the sea.", "How do I boil an egg?", "What is the difference between a lake and a river?",
    "Suggest a name for a black cat.", "Translate 'good morning' into Spanish.", "Who wrote Romeo and Juliet?",
    "What should I pack for a weekend in the mountains?", "Write a Python function that reverses a string.",
    "Summarize in one sentence why sleep is important.", "What is 15% of 80?", "List five vegetables that grow in winter.",
    "Rewrite this politely: Send me the report now.", "Why is the sky blue?", "How do I remove a coffee stain from a shirt?",
    "Write the opening line of a detective story.", "What does the word 'reluctant' mean?", "Give an example of a renewable energy source.",
    "How many continents are there, and which is the largest?", "Explain what a hash table is to a beginner.",
    "Draft an email that asks for a day off.", "What are the primary colors?", "Correct the grammar: She don't like apples.",
    "How does a vaccine work?", "Recommend an indoor hobby and say why.", "What is the plot of Cinderella?",
    "Convert 5 kilometers to miles.", "Name two advantages and one disadvantage of living in a city.",
    "What is a good way to remember names?", "Tell me a fact about the planet Saturn.",
)  # fmt: skip


def own_answer_bits(subject: OpenModel, logprobs: LogProbs, folder: Path) -> list[DocumentBits]:
    """The bits of each answer that the base model gave. It writes them into `folder`, where the later ones find them; nothing if it does
    not answer in a chat."""
    tokenizer, path = subject.tokenizer, folder / "answers-before.jsonl"
    if subject.name == BASE.model:
        path.unlink(missing_ok=True)
        if subject.chat:
            _answer(subject, path)
    if not path.is_file() or subject.name == START:
        return []
    rows = jsonl.read(path)
    with bar(f"{subject.name}: answers as before", sum(len(row["answer"]) for row in rows)) as progress:
        nats = list(logprobs([(row["prompt"], row["answer"]) for row in rows], progress.advance))
    return [
        DocumentBits(
            hashlib.blake2b(row["question"].encode(), digest_size=8).hexdigest(), DOMAIN, -value / math.log(2),
            int(tokenizer.byte_lengths[row["answer"]].sum()), len(row["answer"]),
        )
        for row, value in zip(rows, nats, strict=True)
    ]  # fmt: skip


def _answer(subject: OpenModel, path: Path) -> None:
    from lmworks.inference.generate import GenerateOptions, generate

    tokenizer = subject.tokenizer
    prompts = [chat_prompt(tokenizer, question) for question in QUESTIONS]
    room = subject.context - max(map(len, prompts))
    options = GenerateOptions(max_new_tokens=min(TOKENS, room), temperature=0.0, stop_ids=tuple(tokenizer.stop_ids))
    answers = generate(subject.model, prompts, options) if room > 0 else [[] for _ in prompts]
    known = len(tokenizer.byte_lengths)  # the embedding may have rows that no text has, and an untrained model may choose them
    answers = [list(takewhile(lambda token: token < known, answer)) for answer in answers]
    rows = [
        {"question": question, "prompt": prompt, "answer": answer, "text": tokenizer.decode(answer, skip_special=True)}
        for question, prompt, answer in zip(QUESTIONS, prompts, answers, strict=True) if tokenizer.byte_lengths[answer].sum()
    ]  # fmt: skip
    files.write_text(path, b"".join(map(jsonl.line, rows)).decode())
