"""OpenAI's parameters that this server accepts because they cannot change the answer, what it says about those it lacks, and errors.

`NO_EFFECT` and `NEUTRAL` are all that is accepted without being used. Anything else is a field of the schemas in `protocol`, or refused.
Errors are in OpenAI's format.
"""

from __future__ import annotations

import re
from typing import Any

from lmworks.errors import one_line


class BadRequest(Exception):
    """A rejected request; `param` names the invalid field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error response in OpenAI's format."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    error = {"message": one_line(message), "type": kind, "param": param, "code": code}
    # message and param may quote a lone surrogate from the request
    return {"error": {name: text and text.encode("utf-8", "replace").decode() for name, text in error.items()}}


NO_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",  # OpenAI
    "priority", "spaces_between_special_tokens",  # vLLM; special tokens have no text here
    "cache_prompt", "id_slot",  # llama.cpp
})  # fmt: skip
"""Parameters about bookkeeping, speed and scheduling."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "modalities": (["text"],), "verbosity": ("medium",),
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "detokenize": (True,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "bad_words": ([],), "allowed_token_ids": ([],), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "truncate_prompt_tokens": (), "prompt_logprobs": (), "include_reasoning": (True,),
    "repeat_penalty": (1,), "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "dynatemp_range": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "top_n_sigma": (-1,), "min_keep": (0, 1), "n_probs": (0,), "grammar": ("",),
}  # fmt: skip
"""Parameters of OpenAI, vLLM and llama.cpp that the server lacks, and the values of them that say what it does anyway."""

_INSTEAD = {
    "functions": "tools", "function_call": "tool_choice", "n_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty", "enable_thinking": "chat_template_kwargs.enable_thinking",
    "guided_grammar": "guided_regex or guided_json", "grammar": "guided_regex or guided_json", "json_schema": "response_format",
}  # fmt: skip
_ID = re.compile(r"\d{1,18}", re.ASCII)
_MOST_BIAS = 100


def accepted(name: str, value: Any) -> bool:
    """Whether an unused parameter cannot change the answer with this value. Raises `BadRequest` for another value of a neutral one."""
    if name in NO_EFFECT or value is None:
        return True
    if name not in NEUTRAL:
        return False
    if any(value == one and (type(value) is type(one) or (_number(value) and _number(one))) for one in NEUTRAL[name]):  # 1 is not True
        return True
    only = f", only {' or '.join(map(repr, NEUTRAL[name]))} is" if NEUTRAL[name] else ""
    raise BadRequest(f"{name} is not supported by this server{only}; {_advice(name)}", name)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _advice(name: str) -> str:
    return f"use {_INSTEAD[name]}" if name in _INSTEAD else "remove it"


def instead(name: str) -> str | None:
    """What to use in place of a parameter that the server lacks."""
    return _INSTEAD.get(name)


def read_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias`, an object of token ids and numbers, as pairs. Raises `BadRequest` for the first fault."""
    if not isinstance(value, dict):
        raise BadRequest("logit_bias is an object of token ids and numbers from -100 to 100", "logit_bias")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        shown = key[:30] if isinstance(key, str) else key
        if not isinstance(key, str) or not _ID.fullmatch(key):
            raise BadRequest(f"logit_bias has the key {shown!r}, which is not a token id", "logit_bias")
        if not _number(bias) or not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise BadRequest(f"logit_bias of the token {shown} is not a number from -{_MOST_BIAS} to {_MOST_BIAS}", "logit_bias")
        if int(key) in pairs:
            raise BadRequest(f"logit_bias names the token {int(key)} twice", "logit_bias")
        pairs[int(key)] = float(bias)
    return tuple(pairs.items())
