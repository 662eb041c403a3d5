"""Replies: stops, truncation, samples, batches and the two kinds of models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.evaluate.conftest import ByteTokenizer

from generation_models import Scripted
from lmworks.evaluate.generation.interface import Prompt, ask
from lmworks.evaluate.generation.replies import Answerer
from lmworks.inference import generate


def prompt(text: str, most: int = 40, stop: tuple[str, ...] = (), **more: object) -> Prompt:
    return Prompt("toy", text[:12], text, ask(text), None, most, stop, **more)  # type: ignore[arg-type]


REPLIES = {"one?": " the first\nQuestion: two?", "long?": "x" * 60, "stop?": "ab\nclass C", "byte?": "déf é\n\nmore"}


def test_a_base_model_is_cut_at_stops_and_a_limit_is_told(byte_tokenizer: ByteTokenizer) -> None:
    answerer = Answerer(Scripted(REPLIES), byte_tokenizer, chat=False)
    stops = ("\nQuestion:", "\n\n", "\nclass")
    [[first], [long], [stopped], [accents]] = answerer([prompt(text, stop=stops) for text in ("one?", "long?", "stop?", "byte?")])
    assert (first.text, first.truncated) == (" the first", False)
    assert (long.text, long.truncated, long.tokens) == ("x" * 40, True, 40)
    assert (stopped.text, stopped.truncated) == ("ab", False)
    assert accents.text == "déf é"
    assert stopped.tokens == len("ab\nclass")  # the row ended with its stop, while the long one went on
    assert first.prompt_tokens == 4
    [[earliest]] = answerer([prompt("byte?", stop=("f", "éf"))])
    assert earliest.text == "d"


def test_without_stops_the_end_of_text_ends_it(byte_tokenizer: ByteTokenizer) -> None:
    answerer = Answerer(Scripted(REPLIES), byte_tokenizer, chat=False)
    [[reply]] = answerer([prompt("one?")])
    assert (reply.text, reply.truncated) == (REPLIES["one?"], False)


def test_a_chat_model_gets_messages_and_the_beginning_of_its_reply(byte_tokenizer: ByteTokenizer) -> None:
    model = Scripted({"one?": "<think>hm</think> 7\n\nclass", "one?It is": " eight"})
    answerer = Answerer(model, byte_tokenizer, chat=True)
    [[plain], [begun]] = answerer([prompt("one?", stop=("\n\n",)), prompt("one?It is", prefix="It is")])
    assert plain.text == "7\n\nclass"  # no stops, no thoughts
    assert plain.prompt_tokens == len("one?") + 2
    assert begun.text == ""  # its message is the text, and the prefix comes after it
    begun_prompt = Prompt("toy", "x", "unused", ask("one?"), None, 40, prefix="It is")
    assert answerer([begun_prompt])[0][0].text == " eight"


def test_no_bos_stands_inside_a_prompt() -> None:
    class WithBos(ByteTokenizer):
        prefix = (256,)

        def encode(self, text: str) -> list[int]:
            return [256, *text.encode()]

    answerer = Answerer(Scripted(REPLIES), WithBos(), chat=True)
    bare, begun = (answerer.encode(prompt("one?", prefix=prefix)) for prefix in ("", "It is"))
    assert begun == [*bare, *b"It is"]


def test_a_prompt_beyond_the_context_is_empty_and_truncated(byte_tokenizer: ByteTokenizer) -> None:
    answerer = Answerer(Scripted(REPLIES, context=20), byte_tokenizer, chat=False)
    done: list[int] = []
    [[short], [beyond]] = answerer([prompt("one?"), prompt("y" * 20)], advance=done.append)
    assert short.truncated and short.tokens == 16  # the context ends the reply
    assert (beyond.text, beyond.truncated, beyond.tokens) == ("", True, 0)
    assert sum(done) == 2


def test_batches_are_bounded_by_tokens_and_prefill_by_pieces(byte_tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_PREFILL_TOKENS", 64)
    texts = [f"{'z' * (20 * n)}one?" for n in range(8)]
    model = Scripted(REPLIES)
    replies = Answerer(model, byte_tokenizer, chat=False, batch_tokens=400)([prompt(text, stop=("\n",)) for text in texts])
    assert [reply.text for [reply] in replies] == [" the first"] * 8  # in the order asked
    assert model.widest <= 64
    assert 1 < len(model.rows) < 8 and max(model.rows) > 1
    monkeypatch.setattr(generate, "_PREFILL_TOKENS", 1 << 20)
    whole = Answerer(Scripted(REPLIES), byte_tokenizer, chat=False)([prompt(text, stop=("\n",)) for text in texts])
    assert whole == replies


def test_pieces_of_a_prompt_equal_the_whole(small_transformer, byte_tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [prompt("It was the best of times, it was the worst", most=12), prompt("def f(x):", most=12)]
    whole = Answerer(small_transformer, byte_tokenizer, chat=False)(asked)
    monkeypatch.setattr(generate, "_PREFILL_TOKENS", 10)
    assert Answerer(small_transformer, byte_tokenizer, chat=False)(asked) == whole


def test_samples_depend_on_seed_item_and_number_only(small_transformer, byte_tokenizer: ByteTokenizer) -> None:
    def draw(texts: list[str], seed: int = 0, samples: int = 3) -> list[list[str]]:
        asked = [prompt(text, most=8, samples=samples) for text in texts]
        return [[one.text for one in of] for of in Answerer(small_transformer, byte_tokenizer, chat=False, seed=seed)(asked, 1.0)]

    same = [replace(prompt("some text", most=8), id=str(number)) for number in range(4)]
    assert len({one.text for [one] in Answerer(small_transformer, byte_tokenizer, chat=False)(same, 1.0)}) == 4
    alone, together = draw(["some text"]), draw(["another text", "some text"], samples=5)
    assert len(set(alone[0])) == 3
    assert together[1][:3] == alone[0]
    assert draw(["some text"], seed=1) != alone
