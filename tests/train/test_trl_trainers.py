"""Losses and gradients of all stages against TRL's trainers, from the texts of a data set to the gradient of every parameter.

TRL tokenizes, collates, generates and scores by its own code on the exported weights; our stages get the ids and masks of its batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.export.huggingface import write_model
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.model import Model
from lmworks.train.answers import Answer, PackedAnswers, differentiate, pack
from lmworks.train.dpo import preference_loss
from lmworks.train.grpo import Sampled, advantages, policy_loss
from lmworks.weights.names import to_huggingface
from small_config import small_config

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl", minversion="1.16")

LOSS = 1e-5
# Both compute in fp32, in another order: relative to the largest gradient of a matrix.
GRADIENT = 2e-5
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
LENGTH, PAIRS = 64, 4
COLUMNS = ("input_ids", "attention_mask", "completion_mask")


def texts(seed: int, count: int, most: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in draw.integers(0, 62, draw.integers(2, most))) for _ in range(count)]


def pairs_of_texts() -> list[dict[str, str]]:
    columns = zip(texts(1, PAIRS, 6), texts(2, PAIRS, 12), texts(3, PAIRS, 12), strict=True)
    return [{"prompt": a, "chosen": " " + b, "rejected": " " + c} for a, b, c in columns]


def tokenizer_of() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def models_of(folder: Path, seed: int) -> tuple[Transformer, Any]:
    """The same weights in our model and in that of transformers."""
    from transformers import AutoModelForCausalLM

    ours = initialize(Transformer(Model.model_validate(small_config(initializer_range=0.2))), seed).eval()
    write_model(ours, folder, {"eos_token_id": 1, "pad_token_id": 0}, torch.float32)
    return ours, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    common = {"use_cpu": True, "bf16": False, "report_to": [], "output_dir": str(folder), "gradient_checkpointing": False, "seed": 1}
    return common | changes


def answers_of(ids: Tensor, attention: Tensor, learned: Tensor) -> list[Answer]:
    """The rows of a padded batch."""
    rows = zip(ids, attention.bool(), learned.bool(), strict=True)
    return [Answer(row[seen].int().numpy(), mask[seen].numpy()) for row, seen, mask in rows]


def backward(ours: Transformer, packed: PackedAnswers, loss: Any, normalizer: float) -> Tensor:
    """The value of the objective; the gradients are left in the model, as in a step."""
    parallel = ParallelModel([ours])
    batch, value = differentiate(packed, parallel.token_cross_entropy(packed.batch), loss, normalizer)
    parallel.forward_backward(batch, len(batch.tokens), 4, 1 / normalizer)
    return value


def score(model: Transformer, packed: PackedAnswers) -> Tensor:
    return -ParallelModel([model]).token_cross_entropy(packed.batch).double()


def require_equal(ours: Transformer, value: Tensor, theirs: Any, loss: Tensor) -> None:
    loss.backward()
    assert float(value) == pytest.approx(float(loss), abs=LOSS)
    found = dict(to_huggingface({name: one.grad for name, one in ours.named_parameters()}, ours.config))
    expected = {name.removeprefix("module."): one.grad for name, one in theirs.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(found[name], gradient, atol=GRADIENT * float(gradient.abs().max()), rtol=0, msg=name)


def test_sft(tmp_path: Path) -> None:
    from datasets import Dataset

    ours, model = models_of(tmp_path / "model", 1)
    rows = [{"prompt": a, "completion": " " + b} for a, b in zip(texts(1, 6, 6), texts(2, 6, 12), strict=True)]
    args = trl.SFTConfig(**arguments(tmp_path, per_device_train_batch_size=6, max_length=LENGTH, completion_only_loss=True))
    theirs = trl.SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of())
    theirs.model.eval()
    inputs = next(iter(theirs.get_train_dataloader()))
    learned = inputs["labels"] != -100
    packed = pack(answers_of(inputs["input_ids"], inputs["attention_mask"], learned), LENGTH, 0)
    labels = float(packed.lengths().sum())
    assert labels == int(learned.sum()) > 6
    sums = ParallelModel([ours]).forward_backward(packed.batch, len(packed.batch.tokens), 4, 1 / labels)
    require_equal(ours, sums.cross_entropy / labels, theirs.model, theirs.compute_loss(theirs.model, dict(inputs)))


@pytest.mark.parametrize("options", [{}, {"beta": 0.7}, {"loss": "ipo"}], ids=str)
def test_dpo(tmp_path: Path, options: dict[str, Any]) -> None:
    """The policy is not the reference: another one's weights."""
    from datasets import Dataset

    node = Dpo.model_validate(options)
    ours, model = models_of(tmp_path / "model", 1)
    reference, their_reference = models_of(tmp_path / "reference", 2)
    args = trl.DPOConfig(
        **arguments(tmp_path, per_device_train_batch_size=PAIRS, max_length=LENGTH, beta=node.beta),
        loss_type=[node.loss],
    )  # fmt: skip
    theirs = trl.DPOTrainer(
        model=model,
        ref_model=their_reference,
        args=args,
        train_dataset=Dataset.from_list(pairs_of_texts()),
        processing_class=tokenizer_of(),
    )
    theirs.model.eval()
    inputs = next(iter(theirs.get_train_dataloader()))
    both = answers_of(*(inputs[name] for name in COLUMNS))
    packed = pack([one for pair in zip(both[:PAIRS], both[PAIRS:], strict=True) for one in pair], LENGTH, 0)

    def pairs(values: Tensor) -> Tensor:
        return packed.sums(values).view(-1, 2)

    reference_P2 = pairs(score(reference, packed))
    lengths_P2 = packed.lengths().view(-1, 2)
    value = backward(ours, packed, lambda logp: preference_loss(node, pairs(logp), reference_P2, lengths_P2).loss, float(PAIRS))
    require_equal(ours, value, theirs.model, theirs.compute_loss(theirs.model, dict(inputs)))


def test_simpo(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    node = Dpo.model_validate({"loss": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1})
    ours, model = models_of(tmp_path / "model", 1)
    args = CPOConfig(
        **arguments(tmp_path, per_device_train_batch_size=PAIRS, max_length=LENGTH, beta=node.beta, remove_unused_columns=False),
        loss_type="simpo", simpo_gamma=node.simpo_gamma, label_smoothing=node.label_smoothing, cpo_alpha=0.0,
    )  # fmt: skip
    theirs = CPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(pairs_of_texts()), processing_class=tokenizer_of())
    theirs.model.eval()
    inputs = next(iter(theirs.get_train_dataloader()))
    both = [
        answers_of(inputs[f"{kind}_input_ids"], inputs[f"{kind}_attention_mask"], inputs[f"{kind}_labels"] != -100)
        for kind in ("chosen", "rejected")
    ]
    packed = pack([one for pair in zip(*both, strict=True) for one in pair], LENGTH, 0)
    lengths_P2 = packed.lengths().view(-1, 2)
    value = backward(ours, packed, lambda logp: preference_loss(node, packed.sums(logp).view(-1, 2), None, lengths_P2).loss, float(PAIRS))
    require_equal(ours, value, theirs.model, theirs.compute_loss(theirs.model, dict(inputs)))


def test_kto(tmp_path: Path) -> None:
    """The answers from which the divergence is estimated are those that TRL pairs with other prompts."""
    from datasets import Dataset

    node = Dpo.model_validate({"loss": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8})
    ours, model = models_of(tmp_path / "model", 2)
    reference, their_reference = models_of(tmp_path / "reference", 1)
    rows = [{"prompt": one["prompt"], "completion": one["chosen"], "label": number % 3 > 0} for number, one in enumerate(pairs_of_texts())]
    args = trl.KTOConfig(
        **arguments(tmp_path, per_device_train_batch_size=PAIRS, max_length=LENGTH, beta=node.beta),
        desirable_weight=node.desirable_weight, undesirable_weight=node.undesirable_weight,
    )  # fmt: skip
    theirs = trl.KTOTrainer(
        model=model, ref_model=their_reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of()
    )
    theirs.model.eval()
    inputs = next(iter(theirs.get_train_dataloader()))
    both = [answers_of(*(inputs[f"{kind}{name}"] for name in COLUMNS)) for kind in ("", "KL_")]
    packed = pack([one for pair in zip(*both, strict=True) for one in pair], LENGTH, 0)
    labels_P = torch.as_tensor(inputs["label"], dtype=torch.bool)
    assert labels_P.any() and not labels_P.all()

    def pairs(values: Tensor) -> Tensor:
        return packed.sums(values).view(-1, 2)

    reference_P2, lengths_P2 = pairs(score(reference, packed)), packed.lengths().view(-1, 2)
    assert float((pairs(score(ours, packed)) - reference_P2)[:, 1].mean()) > 0.1, "below 0 the divergence is 0"
    value = backward(ours, packed, lambda logp: preference_loss(node, pairs(logp), reference_P2, lengths_P2, labels_P).loss, float(PAIRS))
    require_equal(ours, value, theirs.model, theirs.compute_loss(theirs.model, dict(inputs)))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_grpo(tmp_path: Path, loss: str) -> None:
    """TRL generates and rewards; then the weights change, so that ratios are clipped."""
    from datasets import Dataset

    size, most = 4, 8
    node = Grpo.model_validate({"loss": loss, "group_size": size, "max_new_tokens": most, "importance_cap": None})
    before, model = models_of(tmp_path / "model", 1)
    rewards: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        rewards[:] = [len(set(one.split())) / most + one.count("7") for one in completions]
        return list(rewards)

    args = trl.GRPOConfig(
        **arguments(tmp_path, per_device_train_batch_size=2 * size), num_generations=size, max_completion_length=most, loss_type=loss,
        beta=0.0, temperature=1.0, epsilon=node.clip_low, shuffle_dataset=False,
        scale_rewards="none" if loss == "dr_grpo" else "group",
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": text} for text in texts(1, 2, 6)])
    theirs = trl.GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=prompts, processing_class=tokenizer_of())
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = 1  # as its training loop sets it
    inputs = theirs._generate_and_score_completions(next(iter(theirs.get_train_dataloader())))
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    with torch.no_grad():
        old, *_ = theirs._get_per_token_logps_and_entropies(theirs.model, ids, attention, inputs["completion_ids"].shape[1])
    inputs["old_per_token_logps"] = old
    advantages_n = advantages(node, torch.tensor(rewards))
    torch.testing.assert_close(advantages_n.float(), inputs["advantages"], atol=LOSS, rtol=0)
    assert float(advantages_n.abs().max()) > 0.1
    noise = torch.Generator().manual_seed(3)
    ours = initialize(Transformer(before.config), 1).eval()
    with torch.no_grad():
        for one in ours.parameters():
            one += 0.02 * torch.randn(one.shape, generator=noise)
    moved = dict(to_huggingface({name: one.detach() for name, one in ours.named_parameters()}, ours.config))
    theirs.model.load_state_dict(moved, strict=False)
    learned = torch.cat((torch.zeros_like(inputs["prompt_mask"]), inputs["completion_mask"]), 1)
    packed = pack(answers_of(ids, attention, learned), LENGTH, 0)
    old_BT = score(before, packed)
    clipped = []

    def objective(logp_BT: Tensor) -> Tensor:
        found = policy_loss(node, packed, logp_BT, Sampled(old_BT, old_BT), advantages_n)
        clipped.append(float(found.clipped))
        return found.loss

    value = backward(ours, packed, objective, float(packed.lengths().sum()))
    assert clipped[0] > 0
    require_equal(ours, value, theirs.model, theirs.compute_loss(theirs.model, inputs))
