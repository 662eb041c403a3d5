"""What common clients send: each parameter is used, or accepted because it cannot change the answer, or refused by name."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from lmworks.inference.generate import GenerateOptions, generate
from lmworks.model import Transformer
from lmworks.serve.parameters import NEUTRAL, NO_EFFECT
from lmworks.serve.protocol import ChatRequest, CompletionRequest
from lmworks.serve.vocabulary import Vocabulary
from patience import PATIENCE

HTTP = httpx.Client(timeout=PATIENCE)
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "def main("


@pytest.fixture
def client(server) -> openai.OpenAI:  # type: ignore[no-untyped-def]
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def written(client: openai.OpenAI):  # type: ignore[no-untyped-def]
    """The greedy token ids of a completion with some parameters."""

    def ask(vocabulary: Vocabulary, max_tokens: int = 24, **parameters: object) -> tuple[list[str], str]:
        reply = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=max_tokens, temperature=0, logprobs=0, extra_body=parameters
        )
        return reply.choices[0].logprobs.tokens, reply.choices[0].finish_reason

    return ask


@pytest.mark.parametrize("parameters", [
    {"frequency_penalty": 1.5}, {"presence_penalty": 2}, {"repetition_penalty": 1.8}, {"logit_bias": {"70": 100}},
], ids=lambda one: next(iter(one)))  # fmt: skip
def test_parameters_reach_the_sampler(  # type: ignore[no-untyped-def]
    written, model: Transformer, vocabulary: Vocabulary, parameters: dict
) -> None:
    plain, _ = written(vocabulary)
    found, _ = written(vocabulary, **parameters)
    bias = {"logit_bias": tuple((int(key), value) for key, value in parameters.get("logit_bias", {}).items())}
    options = GenerateOptions(max_new_tokens=24, stop_ids=vocabulary.stop_ids, **{**parameters, **bias})
    (expected,) = generate(model, [vocabulary.encode(PROMPT)], options)
    assert found == [vocabulary.token_text(token) for token in expected] != plain
    if "logit_bias" in parameters:
        assert set(found) == {vocabulary.token_text(70)}


def test_stop_tokens_and_a_minimum_length(written, client: openai.OpenAI, vocabulary: Vocabulary) -> None:  # type: ignore[no-untyped-def]
    plain, _ = written(vocabulary)
    texts = [vocabulary.token_text(token) for token in range(vocabulary.size)]
    text = next(one for one in plain[3:] if texts.count(one) == 1)  # halves of characters look alike
    stop, first = texts.index(text), plain.index(text)
    assert written(vocabulary, stop_token_ids=[stop]) == (plain[:first], "stop")
    longer, _ = written(vocabulary, stop_token_ids=[stop], min_tokens=8)
    assert len(longer) >= 8
    assert text not in longer[:8]
    # the model's own end: raised so that it comes first, unless it is ignored or too early
    end = {"logit_bias": {str(vocabulary.eos_id): 100}}
    assert written(vocabulary, **end) == ([], "stop")
    ignored, finish = written(vocabulary, ignore_eos=True, **end)
    assert (len(ignored), finish) == (24, "length")
    assert len(written(vocabulary, min_tokens=5, **end)[0]) == 5
    # a text that stops is not searched in the first tokens, as in vLLM
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, stop=[whole[1]]).choices[0].text == whole[: whole.index(whole[1])]
    late = client.completions.create(**asked, stop=[whole[1]], extra_body={"min_tokens": 10}).choices[0]
    assert late.text.startswith(whole[: whole.index(whole[1]) + 2])
    assert len(late.text) > 8


def test_a_bias_for_every_token_is_taken(client: openai.OpenAI, vocabulary: Vocabulary) -> None:
    bias = {str(token): -100 for token in range(vocabulary.size) if token != 70}
    reply = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, logit_bias=bias, n=3)
    assert [choice.message.content for choice in reply.choices] == [vocabulary.token_text(70) * 4] * 3


@pytest.mark.parametrize(("body", "param", "message"), [
    ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    ({"logit_bias": {"70": 101}}, "logit_bias", "of the token 70 is not a number from -100 to 100"),
    ({"logit_bias": {"70": "5"}}, "logit_bias", "of the token 70 is not a number"),
    ({"logit_bias": {"hello": 5}}, "logit_bias", "the key 'hello', which is not a token id"),
    ({"logit_bias": {"70": 5, "070": 6}}, "logit_bias", "names the token 70 twice"),
    ({"logit_bias": {"512": 5}}, "logit_bias", "the token id 512, but the largest id is 511"),
    ({"logit_bias": {str(token): 1 for token in range(100_000)}}, "logit_bias", "but the largest id is 511"),
    ({"logit_bias": [1]}, "logit_bias", "an object of token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "the token id -1"),
    ({"stop_token_ids": [5] * 100_000}, "stop_token_ids", "at most 1000 items"),
    ({"stop_token_ids": list(range(512)), "min_tokens": 1}, "stop_token_ids", "has all tokens"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, more than the limit of 8"),
    ({"min_tokens": 2, "guided_regex": "a+"}, "min_tokens", "exclude each other"),
    ({"ignore_eos": True, "structured_outputs": {"choice": ["a"]}}, "ignore_eos", "exclude each other"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs", "use one of them"),
    ({"structured_outputs": {"grammar": "b"}}, "structured_outputs.grammar", "Extra inputs are not permitted"),
    ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "Extra inputs are not permitted"),
    ({"use_beam_search": True}, "use_beam_search", "is not supported by this server, only False is; remove it"),
    ({"n_predict": 8}, "n_predict", "is not supported by this server; use max_tokens"),
    ({"repeat_penalty": 1.1}, "repeat_penalty", "only 1 is; use repetition_penalty"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "is not supported by this server; remove it"),
    ({"modalities": ["text", "audio"]}, "modalities", "only ['text'] is"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_values_out_of_range_are_named(client: openai.OpenAI, path: str, body: dict, param: str, message: str) -> None:
    asked = {"messages": HELLO} if path.startswith("chat") else {"prompt": "a"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(f"/{path}", body={"model": "tiny", **asked, **body}, cast_to=object)
    error = refused.value.body
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_what_cannot_change_the_answer_is_accepted_and_does_not(server) -> None:  # type: ignore[no-untyped-def]
    def answer(**more: object) -> str:
        asked = {"messages": HELLO, "max_tokens": 12, "seed": 5, "temperature": 0.9, **more}
        reply = HTTP.post(f"{server.url}/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    plain = answer()
    for name in NO_EFFECT:
        assert answer(**{name: {"a": 1}}) == plain, name
    for name, values in NEUTRAL.items():
        assert [answer(**{name: value}) for value in (*values, None)] == [plain] * (len(values) + 1), name
    off = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "stop_token_ids": [],
           "ignore_eos": False, "min_tokens": 0, "top_k": -1, "top_p": 1, "n": 1, "parallel_tool_calls": True}  # fmt: skip
    assert answer(**off) == plain
    used = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not used & (NO_EFFECT | set(NEUTRAL))  # one place for each


def test_a_top_p_of_zero_is_greedy(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 16}
    greedy = client.chat.completions.create(**asked, temperature=0)
    minimal = client.chat.completions.create(**asked, temperature=1, top_p=0)
    assert minimal.choices[0].message.content == greedy.choices[0].message.content


def test_reasoning_effort_switches_thoughts(client: openai.OpenAI, vocabulary: Vocabulary) -> None:
    def prompt(**more: object) -> int:
        return client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, **more).usage.prompt_tokens

    off = len(vocabulary.chat_prompt(HELLO, thinking=False))
    assert off != len(vocabulary.chat_prompt(HELLO, thinking=True))
    assert prompt(reasoning_effort="none") == off
    assert prompt(reasoning_effort="high") == prompt(extra_body={"chat_template_kwargs": {"enable_thinking": True}}) != off
    with pytest.raises(openai.BadRequestError, match="contradict each other"):
        prompt(reasoning_effort="low", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    with pytest.raises(openai.BadRequestError, match="reasoning_effort: Input should be"):
        prompt(reasoning_effort="much")


def test_cached_tokens_are_counted(client: openai.OpenAI, server) -> None:  # type: ignore[no-untyped-def]
    from lmworks.serve.prefixes import PrefixCache

    block = PrefixCache(1).block
    text = "def counted(name, value): return name, value " * 4
    asked = {"model": "tiny", "max_tokens": 1}

    def total() -> int:
        lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("lmworks_prefix_hit_tokens_total ")))

    for ask in (
        lambda **more: client.completions.create(**asked, prompt=text, **more),
        lambda **more: client.chat.completions.create(**asked, messages=[{"role": "user", "content": text}], **more),
    ):
        salted = {"extra_body": {"cache_salt": str(ask)}}
        first, before = ask(**salted).usage, total()
        assert first.prompt_tokens_details.cached_tokens == 0
        second = ask(**salted).usage
        expected = (second.prompt_tokens - 1) // block * block  # the last token is always read
        assert second.prompt_tokens_details.cached_tokens == expected > 0
        assert total() == before + expected
        chunks = list(ask(**salted, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage == second
        # a prompt counts once for all its answers, read or not
        assert ask(**salted, n=3).usage.prompt_tokens_details.cached_tokens == expected
        fresh = {"extra_body": {"cache_salt": f"{ask} n"}}
        assert ask(**fresh, n=3).usage.prompt_tokens_details.cached_tokens == 0


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 2


@pytest.mark.parametrize("name", ["responses", "embeddings", "audio/speech", "images/generations"])
def test_endpoints_that_are_absent_say_so(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.post(f"/{name}", body={"model": "tiny", "input": "a"}, cast_to=object)
    has = "it has /v1/chat/completions, /v1/completions and /v1/models"
    assert refused.value.body == {
        "message": f"this server has no /v1/{name}; {has}", "type": "not_found_error", "param": None, "code": None
    }  # fmt: skip


@pytest.mark.parametrize("depth", [50, 300, 900, 5_000, 90_000])
def test_deeply_nested_arguments_are_no_fault_of_the_server(server, depth: int) -> None:  # type: ignore[no-untyped-def]
    for arguments in ('{"a": ' + "[" * depth + "]" * depth + "}", '{"a":' * depth + "1" + "}" * depth):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
        reply = HTTP.post(f"{server.url}/v1/chat/completions", content=json.dumps({"messages": messages, "max_tokens": 1}),
                          headers={"Content-Type": "application/json"})  # fmt: skip
        assert reply.status_code in (200, 400), reply.text
        assert reply.status_code == 200 or reply.json()["error"]["type"] == "invalid_request_error"
