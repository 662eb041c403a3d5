"""Models and tokenizers small enough that their probabilities are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lmworks.recipe.schema.model import Model, Moe
from lmworks.tokenizer.special import THINK, State


class ByteTokenizer:
    """One token per byte, then <|endoftext|>, <|user|>, <|assistant|>."""

    special = {"<|endoftext|>": 256, "<|user|>": 257, "<|assistant|>": 258}
    vocab_size = 259
    eos_id = 256
    stop_ids = (256, 257)
    prefix: tuple[int, ...] = ()
    start = (256,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    thoughts = THINK

    def decode_reply(self, ids: list[int]) -> str:
        return self.decode(ids)

    def state_of_thoughts(self, prompt: Sequence[int]) -> State:
        return self.thoughts.state(self.decode(prompt[-16:]))

    def encode_chat(self, messages: list[dict], tools: None = None, add_generation_prompt: bool = False) -> tuple[list[int], list[bool]]:
        ids = [i for m in messages for i in (self.special[f"<|{m['role']}|>"], *self.encode(m["content"]))]
        ids += [self.special["<|assistant|>"]] * add_generation_prompt
        return ids, [False] * len(ids)


class Bigram(nn.Module):
    """A model whose next token depends on the last one only: `table[a, b]` is log p(b | a), so that sums are known by hand."""

    def __init__(self, probabilities: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(probabilities.double().log())
        self.rows_run = 0

    def hidden(self, tokens_BT: Tensor) -> tuple[Tensor, None]:
        self.rows_run += len(tokens_BT)
        return self.embedding(tokens_BT), None

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden + 3.0  # a constant that the softmax must take away

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens_BT)[0])


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def bigram() -> Bigram:
    """A fixed random bigram model over the byte tokenizer's vocabulary."""
    table = torch.rand(259, 259, generator=torch.Generator().manual_seed(7)).double() + 0.01
    return Bigram(table / table.sum(-1, keepdim=True))


@pytest.fixture(scope="session")
def small_transformer() -> nn.Module:
    """A real mixture-of-experts decoder with random weights large enough that its predictions differ."""
    from lmworks.model import Transformer
    from lmworks.model.init import initialize

    moe = Moe(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1)
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
    }
    config = Model(**shape, moe=moe, initializer_range=0.3, max_position_embeddings="96 tokens")
    return initialize(Transformer(config), seed=3).eval()
