"""Requests to the server: bodies that clients send, mutated, to the application in this process around a small real model."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import fuzz_mutate as mutate
from fuzz_campaign import Case, Fault

from lmworks.errors import UserError

CONTEXT = 48
REFUSALS = {400, 401, 403, 404, 405, 408, 413, 415, 429}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number", "description": "one"}, "b": {"type": "array", "items": {"type": "string"}}},
                "required": ["a"],
            },
        },
    }
]
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHATS: list[dict[str, Any]] = [
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "seed": 1,
    },
    {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "max_completion_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
    },
    {"messages": [{"role": "user", "content": "c"}], "tools": TOOLS, "tool_choice": "auto", "max_tokens": 3, "parallel_tool_calls": True},
    {
        "messages": [
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "x", "content": "1"},
        ],
        "tools": TOOLS,
        "max_tokens": 3,
        "n": 2,
        "stop": ["x", "\n"],
    },
    {
        "messages": [{"role": "developer", "content": "e", "name": "f"}],
        "max_tokens": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "text"},
        "metadata": {},
        "user": "u",
        "stop": "z",
    },
]
COMPLETIONS: list[dict[str, Any]] = [
    {"model": "tiny", "prompt": "The", "max_tokens": 4, "temperature": 0.0, "logprobs": 2, "echo": True, "stop": ["."]},
    {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "temperature": 1.5, "seed": 3, "stream": True, "best_of": 2, "suffix": None},
    {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": [[1, 2], [3]], "max_tokens": 2, "presence_penalty": 0, "logit_bias": {}, "top_k": -1, "min_p": 0.5},
]
_OBJECT = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
CONSTRAINED: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 24, "response_format": {"type": "json_object"}},
    {
        "messages": [{"role": "user", "content": "b"}], "max_tokens": 24, "n": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _OBJECT, "strict": True}},
    },
    {"messages": [{"role": "user", "content": "c"}], "max_tokens": 24, "guided_json": _OBJECT, "stream": True},
    {"messages": [{"role": "user", "content": "d"}], "max_tokens": 24, "guided_regex": "[a-z]{1,20}", "n": 2},
    {"messages": [{"role": "user", "content": "e"}], "max_tokens": 24, "guided_choice": ["yes", "no"]},
    {"messages": [{"role": "user", "content": "f"}], "max_tokens": 24, "structured_outputs": {"json": _OBJECT}},
    {"messages": [{"role": "user", "content": "g"}], "max_tokens": 24, "tools": TOOLS, "tool_choice": "required"},
]  # fmt: skip
PATTERNS = [
    "a*", "(a|b)*c{1,500}", "^(?:.{1,30}x){1,30}$", "(?:(?:a{1,60}){1,60}){1,60}", "[^x]*x[^y]{0,800}y", "(", "\\p{L}{900}", "(?i)[a-z]+",
]  # fmt: skip
SIZES = [0, 1, 3, 40, 900, 20_000, 10**7, 10**30, -1, 1.5, True, "3"]
MOST_SECONDS = 10.0
"""Processor time of the server, in which others must have their answer; with this model an answer of theirs takes some milliseconds."""
HEADERS: list[dict[str, str]] = [
    {"content-type": "text/plain"},
    {"content-type": "application/json; charset=utf-16"},
    {"host": "evil.com"},
    {"host": "[::1]evil.com"},
    {"host": ""},
    {"content-length": "-1"},
    {"content-length": "99999999999999999999999"},
    {"content-length": "\xb2"},
    {"authorization": "Bearer \xff"},
    {"origin": "http://evil"},
    {"transfer-encoding": "chunked"},
    {"expect": "100-continue"},
    {"accept": "\xff"},
]
PATHS = [
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/" + "x" * 3000,
    "/v1/models/%00",
    "/v1/models/../..",
    "/nothing",
    "/v1/chat",
]


def schema(draw: Random, depth: int = 0) -> Any:
    """A schema of few bytes that asks for much."""
    if depth > 3 or draw.random() < 0.1:
        return draw.choice([True, False, {}, None, [], "string", {"$ref": "#"}, {"type": "integer"}, {"const": "a" * 200}])
    inner = lambda: schema(draw, depth + 1)  # noqa: E731
    match draw.randrange(9):
        case 0:
            return {"type": "string", "minLength": draw.choice(SIZES), "maxLength": draw.choice(SIZES)}
        case 1:
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case 2:
            count = draw.choice([1, 5, 20, 200])
            return {"allOf": [{"type": "string", "pattern": f"{draw.choice(PATTERNS)}{number}"} for number in range(count)]}
        case 3:
            return {draw.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(draw.choice([0, 1, 3, 12]))]}
        case 4:
            return {"type": "array", "items": inner(), "minItems": draw.choice(SIZES), "maxItems": draw.choice(SIZES)}
        case 5:
            names = [f"p{number}" for number in range(draw.choice([1, 4, 60]))]
            properties = {name: inner() for name in names[:6]}
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": inner()}
        case 6:
            return {"enum": ["x" * draw.choice([0, 3, 3000]) + str(number) for number in range(draw.choice([0, 2, 2000]))]}
        case 7:
            where = draw.choice(["#/$defs/b", "#/$defs/c", "file:///etc/passwd"])
            return {"$defs": {"a": inner(), "b": {"$ref": "#/$defs/a"}}, "$ref": where}
        case _:
            return {"type": "number", "minimum": draw.choice(SIZES), "multipleOf": draw.choice(SIZES), "not": inner()}


def demanding(draw: Random) -> dict[str, Any]:
    """A request whose answers are constrained, with a hostile schema, pattern or number of answers in most cases."""
    body = json.loads(json.dumps(draw.choice(CONSTRAINED)))
    if draw.random() < 0.5:
        body["n"] = draw.choice([1, 2, 16, 128, 129])
    if draw.random() < 0.8:
        for key in ("response_format", "guided_json", "guided_regex", "guided_choice", "structured_outputs", "tools", "tool_choice"):
            body.pop(key, None)
        match draw.randrange(5):
            case 0:
                body["guided_regex"] = "".join(draw.choice(PATTERNS) for _ in range(draw.choice([1, 2, 8])))
            case 1:
                body["guided_choice"] = ["x" * draw.choice([0, 1, 500]) + str(number) for number in range(draw.choice([0, 1, 300]))]
            case 2:
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(draw)}}
            case 3:
                body |= {"tools": json.loads(json.dumps(TOOLS)), "tool_choice": "required"}
                body["tools"][0]["function"]["parameters"] = {"type": "object", "properties": {"a": schema(draw)}, "required": ["a"]}
            case _:
                body["guided_json"] = schema(draw)
    return body


class Requests:
    """Each case is one request; an answer is one of the documented statuses with a body of its form."""

    def prepare(self) -> None:
        import torch
        from fuzz_artifacts import write_tokenizer  # noqa: F401

        import lmworks.serve.api  # noqa: F401
        from lmworks.model import Transformer
        from lmworks.model.init import initialize
        from lmworks.recipe.schema.model import Model

        torch.set_num_threads(1)
        config = Model(
            vocab_size=300,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            max_position_embeddings=f"{CONTEXT} tokens",
        )
        self._model = initialize(Transformer(config), seed=5).eval()

    def begin(self) -> None:
        import httpx
        from fuzz_artifacts import write_tokenizer

        from lmworks import tokenizer
        from lmworks.serve.api import Api
        from lmworks.serve.engine import Engine
        from lmworks.serve.models import Models
        from lmworks.serve.server import ServerOptions
        from lmworks.serve.vocabulary import Vocabulary

        write_tokenizer(Path("tokenizer"))
        self._engine = Engine(self._model, Vocabulary(tokenizer.load(Path("tokenizer"))), "tiny", CONTEXT)
        self._engine.vocabulary.chat_prompt([{"role": "user", "content": "?"}])  # which reads its template now
        transport = httpx.ASGITransport(Api(Models(self._engine), ServerOptions(max_body=1 << 18)).app())
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        self._loop.run_until_complete(self._client.get("/health"))

    def case(self, draw: Random) -> Case:
        headers = {"content-type": "application/json", **(draw.choice(HEADERS) if draw.random() < 0.05 else {})}
        if draw.random() < 0.03:
            return {
                "method": draw.choice(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"]),
                "path": draw.choice(PATHS),
                "headers": headers,
                "body": "",
            }
        if draw.random() < 0.2:
            body = json.dumps(demanding(draw)).encode()
            path = "/v1/chat/completions"
            return {"method": "POST", "path": path, "headers": headers, "body": base64.b64encode(body).decode(), "watched": True}
        path, seeds = draw.choice([("/v1/chat/completions", CHATS), ("/v1/chat/completions", CHATS), ("/v1/completions", COMPLETIONS)])
        body = mutate.spoiled_json(mutate.tree(draw.choice(seeds), draw, 1) if draw.random() < 0.3 else draw.choice(seeds), draw)
        if draw.random() < 0.05:
            body = mutate.data(body, draw)
        return {"method": "POST", "path": path, "headers": headers, "body": base64.b64encode(body).decode()}

    def run(self, case: Case, folder: Path) -> str:
        return self._loop.run_until_complete(self._ask(case))

    async def _ask(self, case: Case) -> str:
        body, headers = base64.b64decode(case["body"]), {name: value.encode("latin-1") for name, value in case["headers"].items()}
        request = self._client.build_request(case["method"], case["path"], content=body, headers=headers)
        asked = asyncio.ensure_future(self._client.send(request))
        if case.get("watched"):
            await self._watch(asked)
        answer = await asked
        if not self._engine.alive:
            raise Fault("the worker of the engine has ended")
        if answer.status_code in REFUSALS:
            self._refusal(answer.content, case["method"] == "HEAD")
            raise UserError(f"{answer.status_code}")
        if answer.status_code != 200:
            raise Fault(f"status {answer.status_code}: {answer.text[:300]}")
        if "event-stream" in answer.headers["content-type"]:
            events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            if events.pop() != "[DONE]" or any("error" in json.loads(event) for event in events):
                raise Fault(f"a stream that does not end well: {answer.text[-300:]}")
        elif "json" in answer.headers["content-type"] and case["method"] != "HEAD":
            answer.json()
        return "answered"

    async def _watch(self, asked: asyncio.Future[Any]) -> None:
        """While a request is at work, /health and a small request of somebody else are answered as if it were not there. Measured in
        processor time of this process, so that a busy machine is no failure."""
        neighbour = {"prompt": "a", "max_tokens": 1, "temperature": 0.0}
        while not asked.done():
            for method, path, body in (("GET", "/health", None), ("POST", "/v1/completions", neighbour)):
                began = time.process_time()
                answer = await self._client.request(method, path, json=body)
                took = time.process_time() - began
                if answer.status_code != 200:
                    raise Fault(f"{path} was answered with status {answer.status_code} beside a request")
                if took > MOST_SECONDS:
                    raise Fault(f"{path} took {took:.1f} s of processor time beside a request")
            await asyncio.sleep(0.05)

    def _refusal(self, body: bytes, empty: bool) -> None:
        if not empty:
            error = json.loads(body)["error"]
            if not error["message"] or len(error["message"]) > 5000:
                raise Fault(f"a refusal of {len(error['message'])} characters")
