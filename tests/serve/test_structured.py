"""JSON schemas, expressions, choices and forced tool calls over HTTP, from a model with random weights, which would write none of them.

The model is asked at several temperatures and limits of tokens: whatever it prefers, what comes must parse and be valid.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from base_models import KINDS, write_tokenizer
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.serve import grammar as grammar_module
from lmworks.serve import grammar_trial
from lmworks.serve.grammar import GrammarError
from lmworks.serve.grammar_trial import Trial
from lmworks.serve.structured import choice_grammar, json_grammar, regex_grammar, require_distinct, restriction, tools_grammar
from lmworks.serve.vocabulary import Vocabulary
from lmworks.tokenizer import Tokenizer, load
from lmworks.tokenizer.reply import read
from small_config import small_config

HELLO: Any = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags", "born"],
    "properties": {
        "name": {"type": "string", "minLength": 2}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "born": {"type": "string", "pattern": "^[0-9]{4}-[ab]+x$"}, "friend": {"$ref": "#/$defs/friend"},
    },
    "$defs": {"friend": {"type": "object", "properties": {"of": {"$ref": "#/$defs/friend"}}, "additionalProperties": False}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["city", "days"], "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 30}, "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}}}}},
    {"type": "function", "function": {"name": "clock"}},
]  # fmt: skip


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def tool_client(start: Any, vocabulary: Vocabulary) -> openai.OpenAI:
    """Of a model in whose context the tools fit."""
    config = Model(**small_config(vocab_size=vocabulary.size), max_position_embeddings="1Ki tokens", initializer_range=0.3)
    served = start(context=1024, model=initialize(Transformer(config), seed=2).eval())
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def require_person(value: Any) -> None:
    """PERSON, written out by hand: the schema is not checked by what generated it."""
    assert isinstance(value, dict) and {"name", "age", "tags", "born"} <= set(value) <= set(PERSON["properties"])  # type: ignore[call-overload]
    assert isinstance(value["name"], str) and len(value["name"]) >= 2
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "green"}
    assert re.fullmatch("[0-9]{4}-[ab]+x", value["born"])
    friend = value.get("friend", {})
    while friend:
        assert set(friend) == {"of"}
        friend = friend["of"]


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("max_tokens", [60, 75, 180])
def test_an_answer_is_valid_at_every_limit(client: openai.OpenAI, max_tokens: int) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=schema_format(PERSON), max_tokens=max_tokens, temperature=1.2, seed=max_tokens, n=4
    )
    for choice in reply.choices:
        require_person(json.loads(choice.message.content or ""))
        assert choice.finish_reason in ("stop", "length")
    assert len({choice.message.content for choice in reply.choices}) > 1


def test_an_answer_is_valid_where_the_context_ends(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt=[1] * (256 - 75), max_tokens=200, temperature=1.2, seed=1, n=4, extra_body={"guided_json": PERSON}
    )
    for choice in reply.choices:
        require_person(json.loads(choice.text))


def test_any_object_and_streams(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**options).choices[0]
    assert isinstance(json.loads(whole.message.content or ""), dict)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True))
    assert streamed == whole.message.content


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_guided_completions(client: openai.OpenAI, temperature: float) -> None:
    def ask(max_tokens: int = 30, **guided: Any) -> str:
        options: Any = {"max_tokens": max_tokens, "temperature": temperature, "seed": 1, "extra_body": guided}
        reply = client.completions.create(model="tiny", prompt="a", **options)
        return reply.choices[0].text

    assert re.fullmatch(r"[a-c]{3}-\d+", ask(guided_regex=r"[a-c]{3}-\d+"))
    assert ask(guided_choice=["yes", "no, never", "Zürich/1"]) in ("yes", "no, never", "Zürich/1")
    require_person(json.loads(ask(80, guided_json=PERSON)))
    assert json.loads(ask(guided_json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2})) in (
        [[one, other] for one in (True, False) for other in (True, False)]
    )


def test_restricted_and_free_answers_share_a_batch(server: Any) -> None:
    import asyncio

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [
                client.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=70, temperature=1, seed=n,
                    **({"response_format": schema_format(PERSON)} if n % 2 else {}))  # type: ignore[arg-type]
                for n in range(8)
            ]  # fmt: skip
            return [reply.choices[0].message.content or "" for reply in await asyncio.gather(*asked)]

    replies = asyncio.run(ask_all())
    for reply in replies[1::2]:
        require_person(json.loads(reply))
    alone = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=70, temperature=1, seed=2
    )
    assert replies[2] == alone.choices[0].message.content, "others' grammars change nothing"


@pytest.mark.parametrize(("choice", "names"), [
    ("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
])  # fmt: skip
def test_forced_calls_have_valid_arguments(tool_client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 70, "temperature": 1.2}
    for seed in range(3):
        (answer,) = tool_client.chat.completions.create(**options, seed=seed, parallel_tool_calls=seed > 0).choices
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        calls = answer.message.tool_calls or []
        assert calls and {call.function.name for call in calls} <= names
        if not isinstance(choice, str) or seed == 0:
            assert len(calls) == 1
        for call in calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "clock":
                assert arguments == {}
                continue
            assert {"city", "days"} <= set(arguments) <= {"city", "days", "unit", "where"}
            assert isinstance(arguments["city"], str) and 1 <= len(arguments["city"]) <= 30 and type(arguments["days"]) is int
            assert arguments.get("unit", "C") in ("C", "F") and set(arguments.get("where", {"x": 0})) == {"x"}
        streamed: dict[int, list[str]] = {}
        for chunk in tool_client.chat.completions.create(**options, seed=seed, parallel_tool_calls=seed > 0, stream=True):
            for part in chunk.choices[0].delta.tool_calls or []:
                streamed.setdefault(part.index, []).extend((part.function.name, part.function.arguments))
        assert list(streamed.values()) == [[call.function.name, call.function.arguments] for call in calls]


TOOL = TOOLS[1]
OTHER = {"type": "function", "function": {"name": "zzz"}}


def forced(parameters: Any) -> Any:
    return {"tools": [{"function": {"name": "f", "parameters": parameters}}], "tool_choice": "required"}


@pytest.mark.parametrize(("body", "message", "param"), [
    ({"response_format": schema_format({"type": "nosuch"})}, "response_format: .*Invalid type: nosuch", "response_format"),
    ({"response_format": schema_format("text")}, "response_format: a schema is a JSON object", "response_format"),
    ({"response_format": schema_format({"allOf": [{"type": "string"}, {"type": "integer"}]})}, "Unsatisfiable schema", "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type is text, json_object or json_schema", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "needs json_schema.schema", "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "has the type json_object and a schema; use one", "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format and guided_json both restrict", "guided_json"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "tools and a restriction of the answer exclude each other", "tools"),
    ({"guided_regex": "["}, "guided_regex: .*invalid regex", "guided_regex"),
    ({"guided_choice": []}, "guided_choice: it needs at least one choice", "guided_choice"),
    ({"response_format": schema_format(PERSON), "max_tokens": 5}, "no answer of at most 5 tokens was found", "response_format"),
    ({"tools": [TOOL, TOOL]}, "tools has two functions with the name clock; rename one", "tools"),
    ({"tools": [TOOL] * 20_000}, "tools: List should have at most 1000 items", "tools"),
    ({"tools": [{"function": {"name": f"f{number}"}} for number in range(20_000)]}, "tools: List should have at most 1000 items", "tools"),
    ({"tools": [{"function": {}}] * 20_000}, "a tool needs function.name", "tools"),
    ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice names 'zzz', but the tools are clock", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "zzz"}, "tool_choice is none, auto, required or", "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice demands a call, but the request has no tools", "tool_choice"),
    (forced({"anyOf": [{}]}), "have 'anyOf', but a forced call", "tool_choice"),
    (forced({"properties": {"a": {"type": 5}}}), "tool_choice: ", "tool_choice"),
    (forced({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}), "a string has 'not', but a forced call", "tool_choice"),
    (forced({"properties": {"a": {"type": "string", "format": ["date"]}}}), r"format \"\['date'\]\" is none of date, time", "tool_choice"),
    (forced({"properties": {"a": {"type": "string", "pattern": 5}}}), "a pattern is a string", "tool_choice"),
    (forced({"properties": {"a": {"type": "string", "enum": [1]}}}), "the enum of a string has no string", "tool_choice"),
    (forced({"properties": {"a": {"type": "string", "minLength": 3, "const": "x"}}, "required": ["a"]}), "no answer", "tool_choice"),
    (forced({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}), r"a \$ref of a forced call refers to", "tool_choice"),
])  # fmt: skip
def test_bad_requests(tool_client: openai.OpenAI, body: Any, message: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        tool_client.chat.completions.create(model="tiny", messages=HELLO, extra_body=body)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


STRINGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"pattern": "^[a-z]*$", "minLength": 5, "maxLength": 6}, ["abcde", "abcdef"], ["abcd", "abcdefg", "abc1e"]),
    ({"enum": ["ab", "c", "", 1], "minLength": 2}, ["ab"], ["c", "", "1"]),
    ({"enum": ["ab", "b"], "const": "b", "pattern": "b"}, ["b"], ["ab"]),
    ({"enum": ["", "x\"/\n"]}, ["", "x\"/\n"], ["x"]),
    ({"pattern": "^a|b"}, ["axx", "xxb", "xbx"], ["xxa", ""]),
    ({"pattern": r"(a|b)c$"}, ["xbc"], ["bcx"]),
    ({"pattern": r"a\\$|[|]x"}, ["xa\\", "1|x1"], ["a\\x", "x"]),
    ({"pattern": r"\d\$"}, ["x1$x"], ["1"]),
    ({"format": "date", "pattern": "^2"}, ["2024-02-29", "2023-12-31"], ["1999-12-31", "2024-02-30", "2024-13-01", "x2024-01-01"]),
    ({"format": "time"}, ["23:59:60Z", "01:02:03.5+01:00"], ["24:00:00Z", "01:02:03"]),
    ({"format": "date-time"}, ["2024-01-31T00:00:00Z"], ["2024-01-31", "2024-01-31 00:00:00Z"]),
    ({"format": "duration"}, ["P1Y2M3DT4H5M6S", "PT5M", "P3W", "P1DT1S"], ["P", "PT", "1Y", "P1S"]),
    ({"format": "email"}, ["a.b+c@ex-ample.org", "x@[127.0.0.1]"], ["a", "a@", "a b@c", "@c"]),
    ({"format": "hostname"}, ["a", "ex-ample.org"], ["-a", "a..b", "a_b"]),
    ({"format": "ipv4"}, ["0.0.0.0", "255.249.199.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    ({"format": "ipv6"}, ["::", "::1", "1:2:3:4:5:6:7:8", "fe80::1", "1::", "1:2::7:8"], ["1:2", ":", "1::2::3", "12345::"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    ({"format": "uri"}, ["http://a.b/c?d=e#f", "mailto:x@y.z", "file:///etc", "http://u:p@[::1]:80/%20"], ["a b", "//x", "1:x", "x:<"]),
]  # fmt: skip


def accepts(grammar: grammar_module.Grammar, ids: list[int]) -> bool:
    matcher = grammar.matcher.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("keywords", "right", "wrong"), STRINGS, ids=[json.dumps(keywords)[:40] for keywords, _, _ in STRINGS])
def test_bare_strings_of_a_forced_call_follow_all_keywords(
    tokenizer: Tokenizer, vocabulary: Vocabulary, keywords: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    schema = {"type": "string", **keywords}
    call = tools_grammar(vocabulary, forced({"properties": {"x": schema}, "required": ["x"]})["tools"], several=False)
    quoted = json_grammar(vocabulary, schema)
    for text in right + wrong:
        written = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        assert accepts(call, tokenizer.encode(written, allow_special=True)) == (text in right), text
        assert accepts(quoted, tokenizer.encode(json.dumps(text))) == (text in right), "llguidance sees it otherwise"


@pytest.mark.parametrize("template", ["<tool_call><arg_key>", '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'])
def test_references_of_a_forced_call_are_those_of_its_parameters(
    tokenizer: Tokenizer, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Not of the object with name and arguments around them."""
    monkeypatch.setattr(Vocabulary, "tool_template", template)
    refs = {"a": "#/definitions/n", "b": "#/$defs/n"} | ({} if "<arg_key>" in template else {"c": "#/properties/a", "name": "#"})
    parameters = {"properties": {name: {"$ref": ref} for name, ref in refs.items()}, "additionalProperties": False,
                  "definitions": {"n": {"type": "integer"}}, "$defs": {"n": {"type": "boolean"}}}  # fmt: skip
    call = tools_grammar(vocabulary, forced(parameters)["tools"], several=False)
    for a, valid in (("1", True), ("true", False)):
        if "<arg_key>" in template:
            values = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in (("a", a), ("b", "true")))
            written = f"<tool_call>f\n{values}</tool_call>"
        else:
            arguments = f'{{"a":{a},"b":true,"c":2,"name":{{"a":3}}}}'
            written = f'<tool_call>\n{{"name":"f","arguments":{arguments}}}\n</tool_call>'
        assert accepts(call, tokenizer.encode(written, allow_special=True)) == valid


def test_the_names_of_tools_are_compared_once() -> None:
    """The event loop waits for this thread: 20,000 names that are each counted in all of them take seconds."""

    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

    require_distinct([{"function": {"name": Name(f"f{number}")}} for number in range(2000)])
    assert Name.compared < 2000


HOSTILE: list[Any] = [
    {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
    {"$ref": "#"},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"type": "array", "minItems": 100_000, "items": {"type": "integer"}},
    {"$defs": {f"a{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{n + 1}"}] * 2, "minItems": 2} for n in range(40)}
     | {"a40": {"type": "integer"}}, "$ref": "#/$defs/a0"},
    {"enum": ["x" * 200_000]},
    {"type": "object", "properties": {"\ud800": {"type": "string"}}, "required": ["\ud800"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_schemas_without_a_short_answer_are_refused(vocabulary: Vocabulary, schema: Any) -> None:
    with pytest.raises(GrammarError):
        json_grammar(vocabulary, schema).answer(200)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)*b", "((a{1,99}){1,99}){1,99}", "(.*a){20}", "([ab]*a[ab]{14}){2}"])
def test_expressions_that_explode_elsewhere_are_bounded(vocabulary: Vocabulary, pattern: str) -> None:
    began = time.process_time()
    try:
        state = regex_grammar(vocabulary, pattern).answer(100)
    except GrammarError:
        return  # refused at once is bounded too
    for _ in range(100):
        state.accept(int(state.allowed().nonzero()[0]))
        if state.error:
            break
    assert time.process_time() - began < 20  # 2 ** 100 attempts never end


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["{", "the assistant answers", "e\u0301 café", "東京 \n  x"])
def test_answers_of_other_tokenizers_have_no_bos_and_no_space_before_them(tmp_path: Path, kind: str, text: str) -> None:
    """Mistral's tokenizer joins a space with the first word, and Qwen's composes characters."""
    write_tokenizer(tmp_path, kind)
    words = Vocabulary(load(tmp_path))
    path = choice_grammar(words, [text]).answer(100).path
    assert path and b"".join(map(words.token_bytes, path)) == text.encode()
    if kind == "llama":
        assert [*load(tmp_path).prefix, *path] == words.encode(text), "the ids that the model knows"  # type: ignore[attr-defined]


def test_calls_in_the_other_form(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that write calls as JSON, as Qwen's does."""
    monkeypatch.setattr(Vocabulary, "tool_template", '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>')
    state, ids = tools_grammar(vocabulary, TOOLS, several=False).answer(60), list[int]()
    while len(ids) < 60:
        token = state.accept(int(state.allowed().nonzero()[-1]))
        if token in vocabulary.stop_ids:
            break
        ids.append(token)
    reply = read(vocabulary.decode(ids), TOOLS)
    assert [call.name for call in reply.calls] in (["weather"], ["clock"]) and not reply.content
    assert isinstance(json.loads(reply.calls[0].arguments), dict)


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_thoughts_before_a_structured_answer_end_in_time(tmp_path: Path, kind: str) -> None:
    """Published vocabularies have <think> as a token that is not special, or as text only. What is thought may look like its end."""
    write_tokenizer(tmp_path, kind)
    words = Vocabulary(load(tmp_path))
    required = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    assert restriction(words, 12, "free", schema_format({"type": "object"}), {}, None, False)
    assert restriction(words, 200, "free", None, {}, TOOLS[1:], False)
    mark = [words.special["<think>"]] if kind == "qwen" else words.encode("<think>")[1:]
    for begun in ([], mark[:1], mark, [*mark, *words.encode('so </think and "')[kind == "llama" :]]):
        state, ids = json_grammar(words, required, "free").answer(60), list[int]()
        for step in range(60):
            allowed = state.allowed()
            assert step >= len(begun) or allowed[begun[step]]
            token = state.accept(begun[step] if step < len(begun) else int(allowed.nonzero()[step * 7 % int(allowed.sum())]))
            if token in words.stop_ids:
                break
            ids.append(token)
        reply = read(b"".join(map(words.token_bytes, ids)).decode("utf-8", "replace"))
        assert set(json.loads(reply.content)) == {"a"} and (reply.reasoning or not begun), begun


def test_text_that_looks_like_a_mark_is_text_in_a_grammar(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen")
    words = Vocabulary(load(tmp_path))
    path = choice_grammar(words, ["a <think> b"]).answer(20).path
    assert path and words.special["<think>"] not in path and b"".join(map(words.token_bytes, path)) == b"a <think> b"


def test_a_grammar_beyond_measure_is_refused_and_delays_nobody(server: Any, client: openai.OpenAI) -> None:
    """480 bytes for which llguidance takes minutes, or gigabytes and an abort. Plain requests are answered meanwhile."""
    hostile = {"type": "string", "allOf": [{"pattern": f"(.*[a-z]){{{n}}}"} for n in range(5, 25)]}
    client.completions.create(model="tiny", prompt="a", max_tokens=8, extra_body={"guided_json": {"type": "boolean"}})  # starts the process
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.completions.create, model="tiny", prompt="a", max_tokens=4, extra_body={"guided_json": hostile})
        answered = 0
        while not asked.done():
            client.completions.create(model="tiny", prompt="a", max_tokens=2)
            assert client.models.list()
            answered += 1
            time.sleep(0.1)  # the trial takes seconds of a core: a few requests say whether it delays them
        with pytest.raises(openai.BadRequestError, match="guided_json: it is too complex: to compile it takes more than"):
            asked.result()
    assert answered > 2, "the trial takes seconds"
    assert client.completions.create(model="tiny", prompt="a", max_tokens=8, extra_body={"guided_regex": "ab"}).choices[0].text == "ab"


def test_a_grammar_is_tried_once_and_walked_through(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, walked, walk = [], [], grammar_trial._walk
    monkeypatch.setattr(grammar_trial, "_walk", lambda found: walked.append(walk(found)))
    trial, answer = Trial(vocabulary), grammar_trial.make()  # in this process
    answer(b"V" + trial._described().encode())
    monkeypatch.setattr(trial, "_process", lambda data: asked.append(data[:1]) or answer(data))
    for _ in range(2):
        trial('start: "a" | "bc"')
        with pytest.raises(GrammarError):
            trial("start: [")
    assert (asked, walked) == ([b"G", b"G"], [None])


def test_many_answers_with_a_long_way_to_their_end_take_no_searches(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a server wait while one of them searches, and a search for each answer or token takes a minute in all."""
    searches: list[int] = []
    search = grammar_module._completion
    monkeypatch.setattr(grammar_module, "_completion", lambda *given: searches.append(given[2]) or search(*given))
    long = json_grammar(vocabulary, {"type": "string", "minLength": 900})
    assert len(searches) == 1
    answers = [long.answer(1000) for _ in range(128)]
    text = []
    for step in range(1000):
        allowed = answers[0].allowed().nonzero().flatten().tolist()
        token = answers[0].accept(allowed[step * 7 % len(allowed)])
        if token in vocabulary.stop_ids:
            break
        text.append(token)
    written = json.loads(b"".join(map(vocabulary.token_bytes, text)))
    assert len(written) >= 900 and sum(searches[1:]) <= 32 * len(text) + 4 * 2048
    assert written.strip("0123456789abcdefghijklmnopqrstuvwxyz"), "not only the fillers of the way"
