"""Scores of a model on generation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmworks import machine
from lmworks.errors import Unavailable
from lmworks.evaluate.found import Found
from lmworks.evaluate.generation.interface import GenerationSet, Judged, Prompt, Reply
from lmworks.evaluate.generation.scoring import score_of
from lmworks.evaluate.items import score_name
from lmworks.evaluate.replies import Answerer
from lmworks.progress import bar

FORM = "generate"
_NOTABLE = 10  # items per score and side
_SHOWN = 2000  # characters of a prompt in the notable items, at each end


def measure(chosen: GenerationSet, answerer: Answerer, count: int | None, shots: int | None, label: str, found: Found) -> None:
    """Add the scores of a set to `found`, or the reason why it cannot be measured here."""
    shots = chosen.shots if shots is None else shots
    try:
        with bar(f"{label}: {chosen.name}") as progress:
            progress.note("making prompts")
            prompts = chosen.prompts(count, shots, answerer)
        with bar(f"{label}: {chosen.name}", sum(prompt.samples for prompt in prompts)) as progress:
            replies = answerer(prompts, chosen.temperature, chosen.top_p, progress.advance)
        judged = _judge(chosen, prompts, replies, label)
    except Unavailable as reason:
        found.unavailable[chosen.name] = str(reason)
        return
    found.asked[chosen.name] = list(chosen.questions())
    by_id = {prompt.id: (prompt, of_item, written) for prompt, of_item, written in zip(prompts, judged, replies, strict=True)}
    scores = chosen.values(list(zip(prompts, judged, strict=True)))
    shown: set[str] = set()
    for ending, values in scores.items():
        parts = [by_id[key] for key in values]
        entry = score_of(list(values.values()), chosen.baseline([prompt for prompt, _, _ in parts]))
        entry |= {"set": chosen.name, "form": FORM, "shots": shots, "norm": None, "chosen": False, "reason": "the only form of this set"}
        entry |= _details(parts, chosen) | _by_subject(parts, values)
        outcomes = [_outcome(prompt, of_item, written, values[prompt.id]) for prompt, of_item, written in parts]
        name = score_name(chosen.name, FORM, shots, *([ending] if ending else []))
        found.add(name, entry, outcomes, _notable([part for part in parts if part[0].id not in shown]))
        shown |= values.keys()


_Parts = Sequence[tuple[Prompt, list[Judged], list[Reply]]]


def _judge(chosen: GenerationSet, prompts: Sequence[Prompt], replies: Sequence[list[Reply]], label: str) -> list[list[Judged]]:
    with bar(f"{label}: judging {chosen.name}", len(prompts)) as progress:

        def one(prompt: Prompt, written: list[Reply]) -> list[Judged]:
            judged = chosen.judge(prompt, written)
            progress.advance(1)
            return judged

        if not chosen.concurrent:
            return list(map(one, prompts, replies))
        executor = ThreadPoolExecutor(machine.cores())
        try:
            return list(executor.map(one, prompts, replies))
        finally:  # after Ctrl-C, programs that have not started are not run
            executor.shutdown(cancel_futures=True)


def _details(parts: _Parts, chosen: GenerationSet) -> dict[str, Any]:
    judged = [one for _, of_item, _ in parts for one in of_item]
    written = [reply for _, _, replies in parts for reply in replies]
    details: dict[str, Any] = {
        "mean_mark": sum(one.mark for one in judged) / len(judged),
        "empty_replies": sum(not reply.text.strip() for reply in written),
        "truncated": sum(reply.truncated for reply in written),
        "failures": dict(Counter(one.failure for one in judged if one.failure)),
        "prompt_tokens": sum(reply.prompt_tokens for reply in written) / len(written),
        "reply_tokens": sum(reply.tokens for reply in written) / len(written),
    }
    if chosen.temperature:
        details |= {"samples": len(judged) // len(parts), "temperature": chosen.temperature, "top_p": chosen.top_p}
    return details


def _by_subject(parts: _Parts, values: dict[str, float]) -> dict[str, Any]:
    subjects: dict[str, list[float]] = {}
    for prompt, _, _ in parts:
        subjects.setdefault(prompt.subject, []).append(values[prompt.id])
    if len(subjects) < 2:
        return {}
    return {"by_subject": {name: {"correct": sum(of), "n": len(of)} for name, of in sorted(subjects.items())}}


def _outcome(prompt: Prompt, judged: Sequence[Judged], written: Sequence[Reply], value: float) -> dict[str, Any]:
    failure = next((one.failure for one in judged if one.failure), None) if value < 1 else None
    return {"set": prompt.set, "id": prompt.id, "subject": prompt.subject, "correct": value == 1, "value": value, "failure": failure,
            "tokens": written[0].prompt_tokens, "answer": written[0].text}  # fmt: skip


def _notable(parts: _Parts) -> list[dict[str, Any]]:
    """Some items that failed and some that did not, with the first reply to each."""
    failed = [part for part in parts if not part[1][0].correct][:_NOTABLE]
    solved = [part for part in parts if part[1][0].correct][:_NOTABLE]
    return [
        {"set": prompt.set, "id": prompt.id, "question": _clipped(prompt.messages[-1]["content"]), "answer": prompt.answer,
         "reply": written[0].text, "extracted": judged[0].extracted, "mark": judged[0].mark, "correct": judged[0].correct,
         "failure": judged[0].failure}
        for prompt, judged, written in (*failed, *solved)
    ]  # fmt: skip


def _clipped(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} [...] {text[-_SHOWN:]}"
