"""Peak learning rates that a recipe leaves out: of random weights, of pretrained weights, and of the stages after pretraining.

- Random weights: Step Law for the model's size and the run's tokens (`scaling_laws.peak_learning_rate`).
- Pretrained weights (`start_from`): what they were trained with is rarely known, but the law at 20 tokens per parameter is near it: it
  gives 4.3e-4 for 8B parameters and 1.8e-4 for 70B, where Llama 3 had 3e-4 and 1.5e-4 (arXiv:2407.21783). The rate of further training
  is a fraction of that, and does not depend on the new budget.
- Stages after pretraining: a fraction of `optimizer.learning_rate`, `AFTER_OWN` behind a pretraining of the recipe's own and
  `AFTER_PRETRAINED` for weights of `start_from`.
"""

from __future__ import annotations

from typing import Literal

from lmworks.recipe.derivation import scaling_laws

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
MUON = 3.0
"""Rate of Muon relative to AdamW where weights are pretrained: a short stage takes AdamW's first steps, whose root mean square is near 1,
and that of Muon is 0.2 in every step. SmolLM2-135M, 40 steps: AdamW is best at 1e-4 of 3e-5, 1e-4 and 3e-4, and Muon still gains from 1e-4
to 3e-4 (LOG.md)."""
_BOTH = "published rates and a sweep on SmolLM2-135M"
_WHY = {"tune": "a sweep on SmolLM2-135M", "dpo": _BOTH, "grpo": _BOTH}


def random_weights(hidden: int, tokens: int) -> tuple[float, str]:
    """The peak rate of training from random weights, and why. `hidden`: parameters outside the embeddings; `tokens`: of the whole run."""
    return scaling_laws.peak_learning_rate(hidden, tokens), (
        f"1.79 N^-0.713 D^0.307 for N = {hidden / 1e6:,.1f}M outside the embeddings and D = {tokens / 1e6:,.1f}M tokens (arXiv:2503.04715)"
    )


def pretrained_weights(hidden: int) -> tuple[float, str]:
    """The peak rate of training pretrained weights further, and why. `hidden`: parameters outside the embeddings."""
    peak = scaling_laws.peak_learning_rate(hidden, scaling_laws.TOKENS_PER_PARAMETER * hidden)
    return _rounded(CONTINUED * peak), (
        f"{CONTINUED:g} of {peak:.3g}, near which weights of {hidden / 1e6:,.1f}M parameters outside the embeddings are pretrained; it "
        "does not depend on the tokens of this run"
    )


def of_stage(stage: str, base: float, lora: bool, pretrained: bool, muon: bool) -> tuple[float, str]:
    """The peak rate of a stage after pretraining, relative to the `base` rate, and why. Adapters are trained with AdamW under muon, too."""
    factor = (AFTER_PRETRAINED if pretrained else AFTER_OWN)[stage]["lora" if lora else "full"]
    factor *= MUON if muon and pretrained and not lora else 1
    what = f"low-rank adapters of {stage}" if lora else stage
    weights = f"pretrained weights, by {_WHY[stage]}" if pretrained else "a model that the recipe pretrains"
    return _rounded(factor * base), f"{factor:g} of the base rate {base:.3g}: {what} on {weights} (docs/tuning.md)"


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
