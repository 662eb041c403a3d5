"""The laws that turn one dial, the size, into a shape, a budget, a batch and a learning rate; and rates for pretrained weights.

- Shape: hidden size over layers near 64 for small and near 128 for large models; SwiGLU width 8/3 of the hidden size.
- Budget: 20 tokens per parameter that a token uses is compute-optimal (Hoffmann et al., arXiv:2203.15556).
- Size within a time: training takes 6 N D operations, so that with D = 20 N a machine of S FLOP/s has time for sqrt(t S / 120).
- Batch: 0.58 D^0.571 tokens, and peak rate: 1.79 N^-0.713 D^0.307, with N parameters outside the embeddings and
  D tokens of training (Li et al., "Step Law", arXiv:2503.04715; AdamW, dense and mixture of experts).
  Muon with update_scale rms moves weights as far as AdamW does (arXiv:2502.16982), so it takes the same rate.
- Weight decay: updates are forgotten after 1 / (rate x decay) steps, and the best share of all steps for that is 1.084 (D/N)^-0.527
  (Bergsma et al., "Power Lines", arXiv:2505.13738). With the rate and batch above, that is a decay of 0.09 to 0.11 at 20 tokens per
  parameter for 100M to 100B parameters, and of 0.04 at 2,000: the default of 0.1. Another rate or batch needs another decay.
- Rate of pretrained weights (`start_from`): what they were trained with is rarely known, but the law at 20 tokens per parameter is near it:
  it gives 4.3e-4 for 8B parameters and 1.8e-4 for 70B, where Llama 3 had 3e-4 and 1.5e-4 (arXiv:2407.21783). The rate of further training
  is a fraction of that, and does not depend on the new budget.
- Rate of the stages after pretraining: a fraction of `optimizer.learning_rate`, `AFTER_OWN` behind a pretraining of the recipe's own and
  `AFTER_PRETRAINED` for weights of `start_from`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import log2
from typing import Literal

from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.units import scaled

EPOCHS_AS_NEW = 4
"""Epochs of a source, up to which repeated text is nearly as good as new text (Muennighoff et al., arXiv:2305.16264)."""
TOKENS_PER_PARAMETER = 20
NOMINAL_SPEED = 1e11  # FLOP/s of a machine that nobody has measured
SPECTRAL_RATE = 0.02
LARGEST_SIZE = 10 * 10**12
RATE_BOUNDS = (1e-5, 1e-2)
FITTED_PARAMETERS, FITTED_TOKENS = (6e7, 1e9), (2e9, 1e11)  # N and D of the runs of the Step Law
STRONG_DECAY = 3.0
"""Weight decay over that of the law above which it is too strong. Published models have 0.4 to 2.5 times that of the law (Llama 2,
OLMo 2, GPT-3; DeepSeek-V3 and GLM-4.5 with all of their parameters as N). Three times the usual decay cost the quickstart 0.002 bits per
byte, ten times 0.04 (LOG.md)."""


def parse_size(text: str) -> int:
    """`125M`, `1.5B` or `15B` as a number of parameters."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kKMBGT])\s*", str(text))
    if not match:
        raise ValueError(f"size {str(text)[:100]!r} is not a number of parameters; write for example '125M' or '1.5B'")
    size = int(Fraction(match[1]) * scaled(match[2]))
    if not 0 < size <= LARGEST_SIZE:
        raise ValueError(f"size {text!r} is no size of a model; shapes are derived up to {LARGEST_SIZE / 1e12:g}T parameters")
    return size


def optimal_size(seconds: float, speed: float) -> int:
    """Active parameters N for which `seconds` at `speed` FLOP/s are the compute-optimal 20 N tokens: C = 6 N D, two digits."""
    return int(float(f"{max(1.0, (seconds * speed / (6 * TOKENS_PER_PARAMETER)) ** 0.5):.2g}"))


def outside_embeddings(model: Model) -> int:
    """N of the laws: all parameters but those of the embedding and the head."""
    return count_parameters(model) - (1 if model.tie_word_embeddings else 2) * (model.vocab_size or 0) * (model.hidden_size or 0)


def peak_learning_rate(parameters: int, tokens: int) -> float:
    """Peak rate for AdamW-sized updates: 1.79 N^-0.713 D^0.307, kept within 1e-5 and 1e-2, three digits."""
    low, high = RATE_BOUNDS
    return float(f"{min(max(1.79 * parameters**-0.713 * tokens**0.307, low), high):.3g}")


def optimal_timescale(tokens_per_parameter: float) -> float:
    """The best time constant of decoupled weight decay, 1 / (peak rate x decay) steps, as a share of all steps."""
    return float(1.084 * tokens_per_parameter**-0.527)


def is_fitted(hidden: int, tokens: int) -> bool:
    """Whether the Step Law was fitted to such runs."""
    return FITTED_PARAMETERS[0] <= hidden <= FITTED_PARAMETERS[1] and FITTED_TOKENS[0] <= tokens <= FITTED_TOKENS[1]


def batch_tokens(tokens: int, sequence_length: int) -> int:
    """Tokens per step: 0.58 D^0.571 as the nearest power of two of sequences, at least one and at most the whole budget."""
    sequences = max(1.0, 0.58 * tokens**0.571 / sequence_length)
    power = 1 << round(log2(sequences))
    while power > 1 and power * sequence_length > tokens:
        power //= 2
    return power * sequence_length


def sequence_length(parameters: int) -> int:
    """Context to begin with, when only the size is given."""
    return 512 if parameters < 20_000_000 else 1024 if parameters < 100_000_000 else 2048 if parameters < 2_000_000_000 else 4096


def round_to(value: float, multiple: int) -> int:
    """Nearest positive multiple."""
    return max(multiple, round(value / multiple) * multiple)


def head_dim(hidden: int) -> int:
    """64 in small models, 128 from a hidden size of 2048."""
    return 128 if hidden >= 2048 and hidden % 128 == 0 else 64 if hidden % 64 == 0 else 32


def kv_heads(heads: int) -> int:
    """The divisor of `heads` nearest to a quarter of them (GQA with groups of four)."""
    return min((k for k in range(1, heads + 1) if heads % k == 0), key=lambda k: (abs(k - heads / 4), k))


def ffn_size(hidden: int) -> int:
    """8/3 of the hidden size, so that SwiGLU's three matrices weigh what two of 4x do; a multiple of 64."""
    return round_to(hidden * 8 / 3, 64)


def aspect(hidden: int) -> float:
    """Hidden size per layer that good small and large models share: 64 at 768 (125M), 128 at 4096 (7B)."""
    return min(128.0, max(32.0, 64 * (hidden / 768) ** 0.41))


_SHAPE = ("hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")


@lru_cache(maxsize=16)
def _counts(model: str) -> dict[tuple[int, int], int]:
    """The parameters of a model, but for its shape, by hidden size and layers: a search for the size asks for many shapes again."""
    return {}


def shape(size: int, model: Model) -> dict[str, int]:
    """The shape whose parameter count is nearest to `size`; experts and top-k stay as `model` says.

    `model` needs its vocabulary. Returns hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
    intermediate_size and, for a mixture of experts, moe_intermediate_size.
    """
    best: tuple[float, dict[str, int]] | None = None
    counts = _counts(model.model_dump_json(exclude={**dict.fromkeys(_SHAPE, True), "moe": {"moe_intermediate_size"}}))
    hidden = 64
    while True:
        dims = {"hidden_size": hidden, "head_dim": head_dim(hidden), "intermediate_size": ffn_size(hidden)}
        dims["num_attention_heads"] = hidden // dims["head_dim"]
        dims["num_key_value_heads"] = kv_heads(dims["num_attention_heads"])
        moe = model.moe
        if moe is not None:
            dims["moe_intermediate_size"] = round_to(dims["intermediate_size"] / (moe.num_experts_per_tok + moe.n_shared_experts), 32)
            moe = moe.model_copy(update={"moe_intermediate_size": dims["moe_intermediate_size"]})
        wanted = max(2, round(hidden / aspect(hidden)))
        smallest = None
        for layers in range(max(2, wanted - wanted // 4), wanted + wanted // 4 + 2):
            if moe is not None and layers <= moe.first_k_dense_replace:
                continue
            plain = {key: value for key, value in dims.items() if key != "moe_intermediate_size"}
            if (hidden, layers) not in counts:
                counts[hidden, layers] = count_parameters(model.model_copy(update={**plain, "num_hidden_layers": layers, "moe": moe}))
            total = counts[hidden, layers]
            smallest = total if smallest is None else smallest
            # Nearness to the size counts most, nearness to the aspect ratio breaks near ties.
            badness = abs(total - size) / size + 0.1 * abs(layers - wanted) / wanted
            if best is None or badness < best[0]:
                best = badness, {**dims, "num_hidden_layers": layers}
        if smallest is not None and smallest > 2 * size:
            assert best is not None
            return best[1]
        # Coarser steps keep the number of heads rich in divisors, for GQA and for splitting over ranks.
        hidden += 64 if hidden < 512 else 128 if hidden < 2048 else 256 if hidden < 4096 else 512


Method = Literal["full", "lora"]

CONTINUED = 0.1
"""Rate of further training relative to the peak of the pretraining that made the weights."""
AFTER_OWN: dict[str, dict[Method, float]] = {
    "tune": {"full": 0.3, "lora": 1.0}, "dpo": {"full": 0.03, "lora": 0.1}, "grpo": {"full": 0.03, "lora": 0.1},
}  # fmt: skip
AFTER_PRETRAINED: dict[str, dict[Method, float]] = {
    "tune": {"full": 0.5, "lora": 5.0}, "dpo": {"full": 0.025, "lora": 0.5}, "grpo": {"full": 0.025, "lora": 1.25},
}  # fmt: skip
"""Published rates for all weights after `tune`. Adapters need about twenty times as much in `dpo` for the same held-out loss, and in `grpo`
a fifth of this taught nothing in 16 steps (SmolLM2-135M, LOG.md)."""
MUON_AFTER_PRETRAINED = 3.0
"""Rate of Muon relative to AdamW where weights are pretrained: a short stage takes AdamW's first steps, whose root mean square is near 1,
and that of Muon is 0.2 in every step. SmolLM2-135M, 40 steps: AdamW is best at 1e-4 of 3e-5, 1e-4 and 3e-4, and Muon still gains from 1e-4
to 3e-4 (LOG.md)."""
_BOTH = "published rates and a sweep on SmolLM2-135M"
_WHY = {"tune": "a sweep on SmolLM2-135M", "dpo": _BOTH, "grpo": _BOTH}


def rate_from_random(hidden: int, tokens: int) -> tuple[float, str]:
    """The peak rate of training from random weights, and why. `hidden`: parameters outside the embeddings; `tokens`: of the whole run."""
    return peak_learning_rate(hidden, tokens), (
        f"1.79 N^-0.713 D^0.307 for N = {hidden / 1e6:,.1f}M outside the embeddings and D = {tokens / 1e6:,.1f}M tokens (arXiv:2503.04715)"
    )


def rate_from_pretrained(hidden: int) -> tuple[float, str]:
    """The peak rate of training pretrained weights further, and why. `hidden`: parameters outside the embeddings."""
    peak = peak_learning_rate(hidden, TOKENS_PER_PARAMETER * hidden)
    return _rounded(CONTINUED * peak), (
        f"{CONTINUED:g} of {peak:.3g}, near which weights of {hidden / 1e6:,.1f}M parameters outside the embeddings are pretrained; it "
        "does not depend on the tokens of this run"
    )


def rate_of_stage(stage: str, base: float, lora: bool, pretrained: bool, muon: bool) -> tuple[float, str]:
    """The peak rate of a stage after pretraining, relative to the `base` rate, and why. Adapters are trained with AdamW under muon, too."""
    factor = (AFTER_PRETRAINED if pretrained else AFTER_OWN)[stage]["lora" if lora else "full"]
    factor *= MUON_AFTER_PRETRAINED if muon and pretrained and not lora else 1
    what = f"low-rank adapters of {stage}" if lora else stage
    weights = f"pretrained weights, by {_WHY[stage]}" if pretrained else "a model that the recipe pretrains"
    return _rounded(factor * base), f"{factor:g} of the base rate {base:.3g}: {what} on {weights} (docs/tuning.md)"


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
