"""What all engines are asked, the settings that they answer with, each with its reason, and reasons that they share.

Which parser of tool calls and of reasoning fits a model is decided by the marks in its chat template.

Records what a model answers to fixed prompts, for the check of a server that claims to serve it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lmworks.deploy.sizing import GB, Fit, Hardware, Scenario
from lmworks.deploy.source import Source
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.inference.generate import GenerateOptions, stream
from lmworks.model import Transformer
from lmworks.serve.vocabulary import Vocabulary
from lmworks.tokenizer import load
from lmworks.tokenizer.special import CHANNEL, Family, tool_form
from lmworks.weights.huggingface import only_pickled, read_model


@dataclass(frozen=True)
class Flag:
    """One setting: an option of the engine's command with its value (None for a switch), or an environment variable (`env`). A `note` is a
    decision that needs no option. `reason` is one line and contains no text of the user's."""

    name: str
    value: str | None
    reason: str
    env: bool = False
    note: bool = False


@dataclass(frozen=True)
class Launch:
    """How an engine is started. `program`: words of the command; `model_option`: words before the path of the model. `key`: how the API
    key gets from its file to the engine: ("env", variable), ("option", option that takes a file) or ("argv", option), which a small
    Python program adds inside the process, where no list of processes shows it. `notes` are paragraphs of the README."""

    program: tuple[str, ...]
    model_option: tuple[str, ...]
    key: tuple[str, str]
    flags: tuple[Flag, ...]
    containerfile: str
    gpu_devices: bool
    notes: tuple[str, ...] = ()
    gguf: bool = False


UNTRIED = "lmworks has not run it on GPUs."
"""In container files: what their authors could not try."""


@dataclass(frozen=True)
class Request:
    """A model, where it shall run, what for, and how it fits there."""

    source: Source
    hardware: Hardware
    scenario: Scenario
    fit: Fit
    host: str
    port: int

    @property
    def context_reason(self) -> str:
        fit, source = self.fit, self.source
        if fit.context == source.context:
            return "the model's whole context"
        return f"of the {source.context:,} tokens of the model; {fit.sequence / GB:.2f} GB of KV cache per sequence and device"

    @property
    def sequences_reason(self) -> str:
        fit = self.fit
        states = f" and {fit.state / 1e6:.1f} MB per sequence" if fit.state else ""
        return (
            f"sequences at once and replica: {fit.cache / GB:.1f} GB of KV cache, {fit.kv_token / 1e3:.1f} kB per token{states}; "
            f"at most what {self.scenario.name} asks"
        )

    @property
    def no_speculation_reason(self) -> str:
        if self.source.model.mtp is None:
            return "no speculative decoding: the model has no layers of multi-token prediction"
        if not self.source.mtp:
            return "no speculative decoding: the config states layers of multi-token prediction, but their weights are missing"
        if not self.scenario.speculate:
            return "no speculative decoding: with many sequences at once, verifying drafts takes the compute of other sequences"
        return "no speculative decoding: this engine does not use layers of multi-token prediction"


def dtype_of(source: Source) -> tuple[str, str]:
    """The type in which the model computes, and why."""
    if source.dtype == "float32":
        return "float32", "the type of the files; the engine's default would round them to 16 bits"
    return source.dtype if source.dtype in ("bfloat16", "float16") else "auto", "the type of the files"


def parallel_reason(request: Request) -> str:
    """Why the model is divided as it is."""
    fit = request.fit
    size = f"{fit.weights / GB:.1f} GB of weights and {fit.cache / GB:.1f} GB of KV cache per GPU"
    if request.scenario.widest:
        return f"all GPUs work on each token, which shortens the wait: {size}"
    return f"as few GPUs per replica as leave room for {request.scenario.room} full sequences: {size}"


def quantized(source: Source, hardware: Hardware) -> list[Flag]:
    """A note on the number format of the weights."""
    if not source.quantization:
        return [Flag("quantization", None, "the weights are not quantized", note=True)]
    slow = source.bits == 8 and not hardware.fp8 and not hardware.on_cpu
    more = "; this GPU does not multiply FP8, so FP8 weights save memory and no time" if slow else ""
    return [Flag("quantization", None, f"read from config.json: weights of {source.bits} bits{more}", note=True)]


@dataclass(frozen=True)
class Parser:
    """Names of a parser in the engines; None if an engine has none."""

    vllm: str | None
    sglang: str | None
    reason: str


@dataclass(frozen=True)
class _ReasoningForm:
    marks: tuple[str, ...]  # all of which the template must contain
    vllm: str
    sglang: str
    reason: str


_TOOL_PARSERS: dict[Family, tuple[str, str]] = {  # vLLM, SGLang
    "glm": ("glm45", "glm45"),
    "deepseek": ("deepseek_v3", "deepseekv3"),
    "mistral": ("mistral", "mistral"),
    "llama": ("llama3_json", "llama3"),
    "hermes": ("hermes", "qwen25"),
    "qwen3_coder": ("qwen3_coder", "qwen3_coder"),
    "harmony": ("openai", "gpt-oss"),
}
_REASONING_FORMS = (
    _ReasoningForm((CHANNEL, "analysis"), "openai_gptoss", "gpt-oss", "the template puts thoughts into a channel, as gpt-oss does"),
    _ReasoningForm(("<think>", "<arg_key>"), "glm45", "glm45", "the template puts thoughts into <think>, as GLM-4.5 does"),
    _ReasoningForm(("<think>", "<｜Assistant｜>"), "deepseek_r1", "deepseek-r1", "the template has DeepSeek's marks and <think>"),
    _ReasoningForm(("<think>", "enable_thinking"), "qwen3", "qwen3", "the template has <think> and enable_thinking, as Qwen3 does"),
)
_NO_TEMPLATE = "the model has no chat template"


def tool_parser(template: str) -> Parser:
    """The parser of tool calls for a chat template."""
    form = tool_form(template)
    if form is None:
        return Parser(None, None, "the template has no tool calls of a known form, so they stay text" if template else _NO_TEMPLATE)
    return Parser(*_TOOL_PARSERS[form.family], form.reason)


def reasoning_parser(template: str) -> Parser:
    """The parser of reasoning for a chat template."""
    for form in _REASONING_FORMS:
        if all(mark in template for mark in form.marks):
            return Parser(form.vllm, form.sglang, form.reason)
    return Parser(None, None, "the template has no thoughts of a known form" if template else _NO_TEMPLATE)


PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "Once upon a time there was a",
    '{"name": "Alice", "age": 30, "city": "',
    "A B C D E F G",
    "The following is a list of the months:",
    "In the beginning",
    "# Introduction\n\nThis document describes",
    "for i in range(10):\n    print(",
)
_LENGTH = 8  # tokens generated for each prompt
_TOP = 10  # alternatives kept for each token
_ROUNDING = 4  # a server may differ by so many times the difference that 16-bit arithmetic makes
_LEAST = {16: 0.05, 8: 0.2, 4: 0.6}
"""Smallest tolerance in nats by the bits of the weights. Published quantizations of 8 and 4 bits change log-probabilities by about 0.02 and
0.1 on average; a model with one damaged layer by more than 1."""


def record(source: Source) -> dict[str, Any]:
    """The recorded answers: {"name", "tolerance", "items": [{"prompt", "tokens": [{"top": [[text, log-probability], ...]}]}]}.

    The model decodes greedily in fp32 on the CPU. The tolerance is the difference that computing in bfloat16 makes, times four, and at
    least 0.05 nats. Raises `UserError` if the model does not fit in memory, or is quantized.
    """
    if source.quantization:
        raise UserError(
            f"{source.name} is quantized, and answers are recorded from the model before that: run lmworks deploy record on it, "
            "and give the file with --expect"
        )
    need = 1.5 * 4 * source.weight_bytes / (4 if source.dtype == "float32" else 2)
    if not source.weight_bytes:
        why = only_pickled(source.directory)
        raise UserError(
            f"answers are recorded from .safetensors files, and {source.directory} has none{why}; or give a file of recorded answers with "
            "--expect"
        )
    machine.require_memory(
        need, f"recording answers of {source.name}", "run lmworks deploy record on a larger machine, and give the file with --expect"
    )
    model = read_model(source.directory)
    vocabulary = Vocabulary(load(source.directory))
    return {"name": source.name, **record_answers(model, vocabulary)}


def record_answers(model: Transformer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Tolerance and items of `record` for a model in memory."""
    items, rounding = [], []
    half = Transformer(model.config).eval()
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16)
    for prompt in PROMPTS:
        ids = vocabulary.encode(prompt)
        tokens, chosen = [], []
        options = GenerateOptions(max_new_tokens=_LENGTH, logprobs=_TOP, stop_ids=vocabulary.stop_ids)
        for (token,) in stream(model, [ids], options):
            if token is None or not _plain(vocabulary, token.id):
                break
            top = sorted(token.top, key=lambda pair: -pair[1])
            tokens.append({"top": [[vocabulary.token_text(other), round(value, 5)] for other, value in top]})
            chosen.append((token.id, token.logprob))
        if tokens:
            items.append({"prompt": prompt, "tokens": tokens})
            rounding += _differences(half, ids, chosen)
    if not items:
        raise UserError("the model ends its answer to every prompt at once; there is nothing to compare a server with")
    tolerance = max(_LEAST[16], _ROUNDING * sum(rounding) / len(rounding))
    return {"tolerance": round(tolerance, 4), "items": items}


def tolerance_for(recorded: float, bits: int) -> float:
    """The tolerance (nats) for a server whose weights have so many bits."""
    return max([recorded, *(least for limit, least in _LEAST.items() if bits <= limit)])


def _plain(vocabulary: Vocabulary, token: int) -> bool:
    """Whether every engine shows the token alike: not a control token, whose text some engines leave out, nor an incomplete character."""
    return vocabulary.decoder().push(token) != ""


@torch.inference_mode()
def _differences(half: Transformer, ids: list[int], chosen: list[tuple[int, float]]) -> list[float]:
    """How much log-probabilities of the chosen tokens change in bfloat16."""
    whole = torch.tensor([[*ids, *(token for token, _ in chosen)]])
    hidden_1TD, _ = half.hidden(whole[:, :-1])
    logprobs_TV = half.logits(hidden_1TD[0, len(ids) - 1 :]).float().log_softmax(-1)
    return [abs(float(logprobs_TV[row, token]) - value) for row, (token, value) in enumerate(chosen)]
