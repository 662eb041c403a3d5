"""Budgets of the recipe: how much of the text and the rows the time pays for on the machines, and the size of a model that it trains.

From random weights the size is compute-optimal for the time (`plan/budget.py`), or for four readings of the text where that is less.
Existing weights are trained further, all of them or low-rank adapters, by the operations that a token costs (`plan/counts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from lmworks.init.meaning import Found
from lmworks.plan.counts import FROZEN, TRAINED
from lmworks.plan.layout import MARGIN, devices
from lmworks.plan.memory import GIB, state_bytes
from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW, TOKENS_PER_PARAMETER, optimal_size
from lmworks.recipe.schema.align import Dpo
from lmworks.recipe.schema.layout import Cluster

SMALLEST = 100_000
"""Parameters of the smallest model; less text than it needs trains no model from random weights where there is anything else to do."""
FEWEST = 20  # steps of a stage
BYTES_PER_TOKEN = 4.0  # of English, by the vocabulary of a published model
_EPOCHS = 2  # of conversations
_TRAINED = 1 - float(Dpo.model_fields["validation_fraction"].default)  # of the pairs; the others are held out
_LONGER = f"; {FEWEST} steps are the fewest, and take longer than that"
TRAINING = 0.7  # share of the time; reading, evaluation and export take the rest
_WEIGHTS = {"pretrain": 2, "tune": 1, "dpo": 1, "grpo": 1}
CPU_MFU = 0.05
"""Of existing weights on a CPU, whose budgets no measurement corrects: adapters of 135M parameters reached 6% of the bf16 peak with rows of
1,024 tokens, and 14% of the measured peak with 256 (docs/assistant.md)."""
_TOKEN_SECONDS = 0.025  # of one token of all answers, which even a model of 0.3M parameters takes on a CPU in fp64
_DECODING = 4  # a token that is drawn costs as much as so many forward passes of a token that is read: it reads all weights again


@dataclass
class Budgets:
    """The numbers of a recipe. `base`: parameters of the model; `lora`: whether adapters are trained, with `lora_why`; `tokenizer`: the
    folder of one that is there."""

    seconds: float
    cluster: Cluster
    base: int = 0
    context: int = 4096
    lora: bool = False
    lora_why: str = ""
    size: str = ""
    size_why: str = ""
    vocab_size: int = 4096
    tokenizer: str = ""
    text_tokens: int = 0
    tokens: int = 0
    readings: float = EPOCHS_AS_NEW
    bytes_per_token: float = BYTES_PER_TOKEN
    stages: list[str] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """Operations that the time pays for, without those of reading, evaluation and export."""
        return TRAINING * self.seconds * devices(self.cluster) * self.cluster.tflops * 1e12 * self.cluster.mfu

    def share(self, stage: str) -> float:
        """Operations for one of the stages."""
        return self.flops * _WEIGHTS[stage] / sum(_WEIGHTS[one] for one in self.stages)

    def tokens_for(self, stage: str) -> int:
        """Tokens that this share trains on."""
        return int(self.share(stage) / ((FROZEN if self.lora else TRAINED) * max(1, self.base)))

    def length(self, found: Sequence[Found], extra: int = 0, paid: float = 1e18, least: float = 0.0) -> tuple[int, float, str]:
        """A sequence length that holds 95% of the sampled rows, a power of two from 256 to 4096, within the context of the model. It is
        shorter where `paid` tokens are fewer than the fewest steps, but holds `least` of the rows. Also the share of the rows that it
        holds, and what to say of it."""
        sizes = sorted(size / self.bytes_per_token + extra for one in found for size in one.lengths) or [1.0]
        wanted, shortest = (1 << max(0, int(sizes[int(share * (len(sizes) - 1))]) - 1).bit_length() for share in (0.95, least))
        most = max(shortest, 1 << max(1, int(paid / FEWEST)).bit_length() - 1)
        free, length = (min(max(256, size), 4096, 1 << (self.context.bit_length() - 1)) for size in (wanted, min(wanted, most)))
        held = sum(size <= length for size in sizes) / len(sizes)
        limited = "; the time allows no longer ones" if length < free else ""
        return length, held, f"{length} tokens hold {held:.0%} of the sampled rows{limited}"


def vocabulary(budgets: Budgets) -> int:
    """A vocabulary whose embedding does not outweigh the layers: 4,096 entries below 10M parameters, as most shipped recipes have, 16,384
    below 100M, 49,152 below 1B (the presets' choice), then 98,304."""
    size = optimal_size(budgets.seconds, devices(budgets.cluster) * budgets.cluster.tflops * 1e12 * budgets.cluster.mfu)
    size = min(size, EPOCHS_AS_NEW * budgets.text_tokens // TOKENS_PER_PARAMETER)
    return next((entries for most, entries in ((1e7, 4096), (1e8, 16_384), (1e9, 49_152)) if size < most), 98_304)


def fits(budgets: Budgets) -> bool:
    """Whether all weights with gradients and optimizer state fit into the memory of the devices."""
    memory = devices(budgets.cluster) * budgets.cluster.memory_gib * GIB * (1 - MARGIN)
    return budgets.base * 4 + state_bytes(budgets.base) <= memory


def choose_adapters(budgets: Budgets, conversations: int) -> None:
    """Adapters where all weights do not fit, or where the time pays for all conversations only with them."""
    if not fits(budgets):
        budgets.lora, budgets.lora_why = True, "all weights with their optimizer state do not fit into the memory"
    elif "tune" in budgets.stages and _EPOCHS * conversations > budgets.tokens_for("tune"):
        budgets.lora, budgets.lora_why = True, "cheaper than all weights, which the time does not pay for"


def tune_budget(budgets: Budgets, rows: list[Found], pretrained: bool) -> tuple[dict[str, str], str]:
    """The keys of the section tune that set its budget, and why."""
    text = sum(one.text_bytes for one in rows) / budgets.bytes_per_token
    paid = budgets.tokens_for("tune") if pretrained else budgets.tokens // 4
    length, _, about = budgets.length(rows, paid=paid, least=0.5)  # of longer ones the end of the answer is cut
    tokens = max(FEWEST * length, min(_EPOCHS * text, paid))
    keys = {"epochs": str(_EPOCHS)}
    why = "whole passes"
    if not pretrained or _EPOCHS * text > paid:
        keys = {"tokens": f"{max(1, round(tokens / length)) * length} tokens"}
        why = (
            f"{_EPOCHS} passes would be about {_EPOCHS * text:,.0f} tokens" if pretrained else "a proportion of the time, beside the phases"
        )
    why += _LONGER * (pretrained and paid < tokens)
    batch = length * power_of_two(tokens / length / (2 * FEWEST), 64)
    return {"sequence_length": f"{length} tokens", "global_batch_tokens": f"{batch} tokens", **keys}, f"{why}; {about}"


def dpo_budget(budgets: Budgets, rows: list[Found]) -> tuple[dict[str, str], int | None, str]:
    """The keys of the section dpo, how many rows the time pays for (None: all), and why."""
    total, each = sum(one.rows for one in rows), ((FROZEN if budgets.lora else TRAINED) + 2) * max(1, budgets.base)  # and the reference
    length, held, about = budgets.length(rows, paid=budgets.share("dpo") / each / 2, least=0.5)
    size = sum(sum(one.lengths) for one in rows) / max(1, sum(len(one.lengths) for one in rows)) / budgets.bytes_per_token
    paid = int(budgets.share("dpo") / (2 * max(size, 1) * each))  # both answers of a pair
    used = min(total, max(ceil(2 * FEWEST / _TRAINED), paid))
    trained = _TRAINED * min(used, held * total)
    keys = {"pairs_per_step": str(max(2, power_of_two(trained / FEWEST, 32))), "sequence_length": f"{length} tokens"}
    about += f"; the time pays for about {paid:,} of {total:,}" * (paid < total) + _LONGER * (paid < used)
    return keys, used if used < total else None, about


def grpo_budget(budgets: Budgets, rows: list[Found]) -> tuple[dict[str, str], str]:
    """The keys of the section grpo, and why."""
    total, answer = sum(one.rows for one in rows), 128
    length = budgets.length(rows, answer)[0]
    prompts = max(1, power_of_two(min(total / 4, 16 if budgets.cluster.on_cpu is False else 4), 16))
    each = prompts * 8 * answer * ((FROZEN if budgets.lora else TRAINED) + 2 * _DECODING) * max(1, budgets.base)
    share = budgets.share("grpo")
    seconds = TRAINING * budgets.seconds * share / max(1.0, budgets.flops)
    steps = int(min(100, max(5, min(share / each, seconds / (answer * _TOKEN_SECONDS)))))
    keys = {
        "group_size": "8", "prompts_per_step": str(prompts), "steps": str(steps), "max_new_tokens": str(answer),
        "sequence_length": f"{length} tokens", "validation_prompts": str(min(64, total // 4)),
    }  # fmt: skip
    return keys, f"a step draws and trains 8 answers to each of {prompts} prompts"


def continue_budget(budgets: Budgets) -> tuple[int, int, int]:
    """Tokens, sequence length and tokens per step of further pretraining: two readings of the text, or what the time pays for."""
    length = min(1024, 1 << (budgets.context.bit_length() - 1))
    wanted = min(_EPOCHS * budgets.text_tokens, int(budgets.share("pretrain") / (TRAINED * budgets.base)))
    length = next((one for one in (length, 512, 256) if one <= length and FEWEST * one <= wanted), min(256, length))
    batch = length * power_of_two(wanted / length / (2 * FEWEST), 256)
    return max(FEWEST, wanted // batch) * batch, length, batch


def power_of_two(value: float, most: int) -> int:
    """The largest power of two up to `value`, from 1 to `most`."""
    return min(most, 1 << int(log2(max(1.0, value))))


def measure_bytes_per_token(texts: Sequence[str], entries: int, encode: Callable[[str], int] | None) -> float:
    """Bytes of text per token, by the tokenizer of a base model (`encode` counts the tokens of a text), or by one trained on half of the
    sample and counted on the other half."""
    texts = [text for text in texts if text.strip()]
    if encode is None and len(texts) == 1:
        middle = len(texts[0]) // 2
        texts = [texts[0][:middle], texts[0][middle:]]
    if not texts or (encode is None and sum(map(len, texts)) < 10_000):
        return BYTES_PER_TOKEN if encode else 0.75 * BYTES_PER_TOKEN
    if encode is None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        small = Tokenizer(models.BPE())
        small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        small.train_from_iterator(texts[::2], trainers.BpeTrainer(vocab_size=entries, show_progress=False, initial_alphabet=alphabet))
        texts = texts[1::2]
        encode = lambda text: len(small.encode(text).ids)  # noqa: E731
    return sum(len(text.encode()) for text in texts) / max(1, sum(map(encode, texts)))
