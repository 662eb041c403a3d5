"""Models and tokenizers in Python: generate, log-likelihoods, hidden states.

A model is opened and computes as in `lmworks evaluate`, so numbers agree with those of the command.

Shapes: T tokens, L layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmworks.errors import UserError
from lmworks.evaluate.generation.replies import Written, cut_at, generate_until
from lmworks.evaluate.logprobs import BatchedLogProbs, Request
from lmworks.evaluate.sets.forms import split_at_boundary
from lmworks.inference.sampling import GenerateOptions
from lmworks.recipe.hub import locate
from lmworks.recipe.schema.units import LARGEST
from lmworks.recipe.weights import find_weights
from lmworks.tokenizer import load as load_folder
from lmworks.weights.open import open_model

if TYPE_CHECKING:
    from lmworks.model import Transformer
    from lmworks.recipe.schema.model import Model as ModelConfig
    from lmworks.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
"""A text to continue, the messages of a conversation whose next answer is wanted, or the ids of a prompt."""


@dataclass(frozen=True)
class Completion:
    """A generated text, without the stop text that ended it.

    tokens: what was generated, without a stop token that ended it. logprobs: the log-probability of each in nats, under the model's own
    distribution (temperature 1, no filters). finish_reason: "stop" at a stop token or a stop text, "length" at the limit of tokens.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt_tokens: int

    def __str__(self) -> str:
        return self.text


class Model:
    """A model with its tokenizer, ready to answer. `module` is the PyTorch module, whose `forward` takes ids (B, T) and returns logits
    (B, T, V) in fp32."""

    def __init__(
        self, module: Transformer, tokenizer: Tokenizer, context: int | None = None, chat: bool = False, name: str = "model"
    ) -> None:  # fmt: skip
        self.module, self.tokenizer, self.context, self.chat, self.name = module, tokenizer, context, chat, name

    def __repr__(self) -> str:
        return f"<lmworks.Model {self.name}: {self.parameters:,} parameters, {self.dtype}, on {self.device}>"

    @property
    def config(self) -> ModelConfig:
        """The architecture, with the names of config.json."""
        return self.module.config

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def device(self) -> torch.device:
        return self.module.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations."""
        return self.module.compute_dtype

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt; messages are rendered with the chat template, up to where the assistant is to speak. Raises `UserError` for
        an empty prompt, and ids outside the vocabulary."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif all(isinstance(one, Mapping) for one in prompt) and prompt:
            ids = self.tokenizer.encode_chat([dict(one) for one in prompt], add_generation_prompt=True)[0]  # type: ignore[arg-type]
        else:
            ids = [int(one) for one in prompt]  # type: ignore[arg-type]
        if not ids:
            raise UserError("the prompt is empty; give at least one token")
        rows = self.module.embedding.num_embeddings
        if not all(0 <= one < rows for one in ids):
            raise UserError(f"a prompt has the id {next(one for one in ids if not 0 <= one < rows)}, outside the vocabulary of {rows:,}")
        return ids

    def generate(
        self, prompt: Prompt, *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int = 0, stop: str | Sequence[str] = (),
    ) -> Completion:  # fmt: skip
        """Continue a text, or answer the last message of a conversation. The options are those of `generate_batch`."""
        return self.generate_batch(
            [prompt], max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop
        )[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int = 0, stop: str | Sequence[str] = (),
    ) -> list[Completion]:  # fmt: skip
        """Continue several prompts together; each has the result that it has alone, up to rounding.

        max_new_tokens: at most as many as the model has positions for. temperature: 0 is greedy. top_k: 0, top_p: 1 and min_p: 0 switch
        these filters off. seed: with the row of the prompt it determines what is drawn. stop: texts that end a completion and are not part
        of it.
        Raises `UserError` for an empty prompt, one that leaves no room in the model's positions, and options out of range.
        """
        rows = [self.encode(prompt) for prompt in prompts]
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise UserError("a stop text is empty; leave it out")
        _require_ranges(max_new_tokens, temperature, top_k, top_p, min_p)
        rooms = [self._room(ids) for ids in rows]
        options = GenerateOptions(
            max_new_tokens=min(max_new_tokens, max(rooms, default=1)), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            stop_ids=tuple(self.tokenizer.stop_ids),
        )  # fmt: skip
        seeds = [seed * 1_000_003 + row for row in range(len(rows))]
        if not rows:
            return []
        written = generate_until(self.module, self.tokenizer, rows, options, [stops] * len(rows), seeds)
        return [self._completion(ids, one, stops, room) for ids, one, room in zip(rows, written, rooms, strict=True)]

    def _room(self, ids: Sequence[int]) -> int:
        """New tokens for which the model has positions. Raises `UserError` if there are none."""
        most = int(self.config.max_position_embeddings or LARGEST)
        if len(ids) >= most:
            raise UserError(f"a prompt has {len(ids):,} tokens, and {self.name} has {most:,} positions; shorten it")
        return most - len(ids)

    def _completion(self, ids: Sequence[int], written: Written, stops: Sequence[str], room: int) -> Completion:
        tokens = written.tokens[:room]
        text = cut_at(self.tokenizer.decode([token.id for token in tokens], skip_special=True), stops)
        finish = "stop" if written.stopped and len(tokens) == len(written.tokens) else "length"
        return Completion(text, tuple(token.id for token in tokens), tuple(token.logprob for token in tokens), finish, len(ids))

    def log_likelihood(self, context: str | Sequence[int], continuation: str | Sequence[int]) -> float:
        """The log-probability in nats of `continuation` after `context`, summed over its tokens, as benchmarks score choices.

        Two texts are encoded together and split where their tokens differ from those of the context alone; ids are taken as they are. An
        empty context is the start of a document: BOS, or the end of text for a tokenizer without it.
        """
        return self.log_likelihoods([(context, continuation)])[0]

    def log_likelihoods(self, pairs: Sequence[tuple[str | Sequence[int], str | Sequence[int]]]) -> list[float]:
        """`log_likelihood` of each pair, computed in batches. Contexts that are too long for the model lose their beginnings."""
        return BatchedLogProbs(self.module, self.context)([self._request(*pair) for pair in pairs])

    def _request(self, context: str | Sequence[int], continuation: str | Sequence[int]) -> Request:
        if isinstance(context, str) and isinstance(continuation, str):
            before, after = split_at_boundary(self.tokenizer, context, continuation) if continuation else ((), ())
        elif isinstance(context, str) or isinstance(continuation, str):
            raise UserError("give context and continuation both as text, or both as ids")
        else:
            before, after = list(context), list(continuation)
        if not before or not after:
            raise UserError("context and continuation need at least one token each")
        return self.encode(before), self.encode(after)

    @torch.no_grad()
    def token_logprobs(self, text: str | Sequence[int]) -> list[float]:
        """The log-probability in nats of each token of a text after those before it; nan for the first, which has nothing before it."""
        from lmworks.serve.engine import score

        return [token.logprob for piece in score(self.module, self.encode(text)) for token in piece]

    @torch.no_grad()
    def hidden_states(self, text: str | Sequence[int]) -> tuple[Tensor, ...]:
        """L + 1 tensors (T, D) in the type of the activations, as `output_hidden_states` of transformers: the embeddings, then the output
        of each layer, the last one normalized."""
        ids_1T = torch.tensor([self.encode(text)], device=self.device)
        states: list[Tensor] = []

        def keep(layer: nn.Module, given: tuple[Any, ...]) -> None:
            states.append(given[0][0])

        hooks = [layer.register_forward_pre_hook(keep) for layer in self.module.layers]
        try:
            last, _ = self.module.hidden(ids_1T)
        finally:
            for hook in hooks:
                hook.remove()
        return (*states, last[0])


def _require_ranges(max_new_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    for name, value, least, most in (
        ("max_new_tokens", max_new_tokens, 1, LARGEST), ("temperature", temperature, 0, LARGEST), ("top_k", top_k, 0, LARGEST),
        ("top_p", top_p, 0, 1), ("min_p", min_p, 0, 1),
    ):  # fmt: skip
        if not least <= value <= most:
            raise UserError(f"{name} is a number from {least} {'on' if most == LARGEST else f'to {most}'}, not {value}")


def load_model(where: str | PathLike[str], device: str | torch.device | None = None) -> Model:
    """Open a model: a run, RUN@base, RUN@tuned or RUN@STEP, a checkpoint, an export, a GGUF file, a folder in Hugging Face format, or
    OWNER/MODEL on the Hugging Face hub.

    device: by default the first GPU, else the CPU. The activations have the precision that the model was trained in, or bf16 weights on a
    device that multiplies bf16; fp32 otherwise.
    Raises `UserError` if there is no model, if it is damaged, or if its tokenizer is that of another model.
    """
    opened = open_model(where if isinstance(where, str) else Path(where), device)
    return Model(opened.model, opened.tokenizer, opened.context, opened.chat, opened.name)


def load_tokenizer(where: str | PathLike[str]) -> Tokenizer:
    """Open the tokenizer of a run, a checkpoint, an export, a GGUF file, a folder in Hugging Face format or with a tokenizer.json, or
    OWNER/MODEL on the hub. Raises `UserError` if there is none."""
    path = Path(locate(where if isinstance(where, str) else Path(where))).expanduser()
    for folder in (path / "tokenizer", path):
        if (folder / "tokenizer.json").is_file():
            return load_folder(folder)
    return load_folder(find_weights(path).tokenizer.parent)
