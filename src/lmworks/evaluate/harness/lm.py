"""Our models behind the model interface of lm-evaluation-harness. Only what runs its tasks imports this file (extra `harness`).

Log-likelihoods come from `BatchedLogProbs` and generated text from `generate_until`, as in our own scores. As in every class for
lm-evaluation-harness, white space at the end of a context is scored with the continuation. The two are then split into tokens by
`split_at_boundary`, as in our own scores: a token that reaches over the boundary is scored, and not dropped.
"""

from __future__ import annotations

import json
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lmworks.errors import UserError
from lmworks.evaluate.generation.replies import generate_until
from lmworks.evaluate.logprobs import BatchedLogProbs, Request
from lmworks.evaluate.sets.forms import split_at_boundary
from lmworks.inference.generate import GenerateOptions
from lmworks.tokenizer.chat import MARKERS, encode_marked, mark
from lmworks.tokenizer.reply import read
from lmworks.ui.terminal import bar, console
from lmworks.weights.open import OpenModel

_MARKER = MARKERS[0]
_MOST_ROWS = 64
_OPTIONS = {"until", "do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "min_p"}


class HarnessLM(TemplateLM):
    """An `OpenModel` as lm-evaluation-harness sees it.

    Memory is bounded by `batch_tokens`, the tokens of one forward pass. Sampled text depends on `seed`, the request and its number. `notes`
    say how many requests have lost their beginnings.
    """

    def __init__(self, opened: OpenModel, batch_tokens: int = 8192, seed: int = 0) -> None:
        super().__init__()
        self.opened, self.model, self.tokenizer = opened, opened.model, opened.tokenizer
        self.batch_tokens, self.seed = batch_tokens, seed
        self.eos_id, self.prefix, self.start = self.tokenizer.eos_id, self.tokenizer.prefix, self.tokenizer.start
        self._logprobs = BatchedLogProbs(opened.model, opened.context, batch_tokens)
        self._device = opened.model.embedding.weight.device
        self.notes: list[str] = []
        self._chat = False  # whether prompts come out of the chat template, so that special tokens in them are special

    @property
    def eot_token_id(self) -> int:
        return self.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS where the tokenizer has one, else the end of text, as in lm-evaluation-harness."""
        return self.start[-1]

    @property
    def max_length(self) -> int:
        """Tokens that the model was trained to look back on."""
        return self.opened.context

    @property
    def max_gen_toks(self) -> int:
        """New tokens for a task that states no number: the default of lm-evaluation-harness."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        return self.opened.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What stands in the results under `config`."""
        return {
            "model": self.opened.name, "model_num_parameters": sum(value.numel() for value in self.model.parameters()),
            "model_dtype": self.opened.precision, "max_length": self.max_length,
        }  # fmt: skip

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as a prompt. Text that looks like a special token is marked, and stays text when the prompt is encoded.

        Without `add_generation_prompt`, the last message is the beginning of the reply, which is left open.
        """
        self._chat = True
        history = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            history[-1]["content"] += MARKERS[1]
        try:
            text = self.tokenizer.render_marked(history, _MARKER, add_generation_prompt)
        except UserError:  # some templates have no system role
            without = [message for message in history if message["role"] != "system"]
            if len(without) == len(history):
                raise
            text = self.tokenizer.render_marked(without, _MARKER, add_generation_prompt)
        return text if add_generation_prompt else text[: text.rindex(MARKERS[1])]

    def encode(self, text: str) -> list[int]:
        """The ids of a text or prompt, with BOS where the tokenizer adds one: what our own scores use."""
        if not self._chat:
            return self.tokenizer.encode(text)
        prefix, ids = list(self.prefix), encode_marked(self.tokenizer, text, _MARKER)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """`encode`; without BOS if `add_special_tokens` is False."""
        ids = self.encode(string)
        return ids[len(self.prefix) :] if add_special_tokens is False else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._chat:
            continuation = mark(self.tokenizer, continuation, _MARKER)
        bare = context.rstrip()
        context, continuation = (bare, context[len(bare) :] + continuation) if bare else (context, continuation)
        if context and not continuation:
            return self.encode(context), []
        before, after = split_at_boundary(self, context, continuation)
        return list(before), list(after)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Sum of the log-probabilities of each continuation after its context, and whether greedy decoding would write it."""
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:  # fmt: skip
        self._note_cut(sum(len(context) + len(rest) - 1 > self.max_length for _, context, rest in requests), len(requests))
        with bar("log-likelihoods", len(requests)) as progress:
            found = self._logprobs.with_greedy([(context, rest) for _, context, rest in requests], progress.advance)
        for (text, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in disjoint windows of the model's context, as lm-evaluation-harness defines them."""
        windows: list[Request] = []
        owner: list[int] = []
        for index, request in enumerate(requests):
            ids = self.tokenizer.encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append(make_disjoint_window(window))
                owner.append(index)
        sums = [0.0] * len(requests)
        with bar("rolling log-likelihoods", len(windows)) as progress:
            for index, value in zip(owner, self._logprobs(windows, progress.advance), strict=True):
                sums[index] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated text up to the first stop string, the end of text, or the limit of tokens.

        Prompts lose their beginnings where the new tokens would not fit into the context. In a chat, thoughts before the reply are
        left out.
        """
        replies = [""] * len(requests)
        cut = 0
        same: dict[str, list[int]] = {}  # requests by their options
        for index, request in enumerate(requests):
            same.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        with bar("generating", len(requests)) as progress:
            for group in same.values():
                options, until = self._generation(requests[group[0]])
                room = max(1, self.max_length - options.max_new_tokens)
                prompts = {index: self.encode(requests[index].args[0]) or [self.prefix_token_id] for index in group}
                cut += sum(len(ids) > room for ids in prompts.values())
                prompts = {index: ids[-room:] for index, ids in prompts.items()}
                for batch in self._batches(prompts, options.max_new_tokens):
                    seeds = [self.seed * 1_000_003 + index for index in batch]
                    rows = [prompts[index] for index in batch]
                    written = generate_until(self.model, self.tokenizer, rows, options, [until] * len(batch), seeds)
                    for index, one in zip(batch, written, strict=True):
                        if self._chat:
                            begins, thoughts = self.tokenizer.state_of_thoughts(prompts[index]), self.tokenizer.thoughts
                            text = read(self.tokenizer.decode_reply(one.ids), begins=begins, thoughts=thoughts).content.lstrip()
                        else:
                            text = self.tokenizer.decode(one.ids, skip_special=True)
                        replies[index] = postprocess_generated_text(text, until, None)
                        self.cache_hook.add_partial("generate_until", requests[index].args, replies[index])
                    progress.advance(len(batch))
        self._note_cut(cut, len(requests))
        return replies

    def _note_cut(self, cut: int, of: int) -> None:
        if cut:
            context = f"the context of {self.max_length:,} tokens"
            self.notes.append(f"{cut:,} of {of:,} requests did not fit into {context} and lost their beginnings")

    def _generation(self, request: Instance) -> tuple[GenerateOptions, list[str]]:
        wanted = normalize_gen_kwargs(request.args[1], self.max_gen_toks)
        unknown = {name for name, value in wanted.items() if name not in _OPTIONS and value is not None}
        if unknown:
            raise UserError(
                f"the task {request.task_name} asks for the generation option {min(unknown)}, which lmworks does not have; "
                f"it has {', '.join(sorted(_OPTIONS))}"
            )
        most, limit = wanted["max_gen_toks"], max(1, self.max_length // 2)
        if most >= self.max_length:
            told = f"{request.task_name}: {limit} new tokens at most and not {most}: the context is {self.max_length} tokens"
            console.print(told, style="yellow")
            most = limit
        top_p = wanted.get("top_p")
        options = GenerateOptions(
            max_new_tokens=most, temperature=float(wanted.get("temperature") or 0.0) if wanted["do_sample"] else 0.0,
            top_k=int(wanted.get("top_k") or 0), top_p=1.0 if top_p is None else float(top_p), min_p=float(wanted.get("min_p") or 0.0),
            stop_ids=tuple(self.tokenizer.stop_ids),
        )  # fmt: skip
        return options, [stop for stop in handle_stop_sequences(wanted["until"], None) if stop]

    def _batches(self, prompts: dict[int, list[int]], new: int) -> list[list[int]]:
        """The longest prompts first, those of similar length together; each batch within `batch_tokens` (a longer prompt alone)."""
        batches: list[list[int]] = []
        width = 0
        for index in sorted(prompts, key=lambda index: -len(prompts[index])):
            if not batches or len(batches[-1]) >= _MOST_ROWS or (len(batches[-1]) + 1) * width > self.batch_tokens:
                batches.append([])
                width = len(prompts[index]) + new
            batches[-1].append(index)
        return batches
