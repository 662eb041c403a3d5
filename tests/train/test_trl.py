"""Losses and gradients of both stages against TRL's own loss functions, on the same log-probabilities.

TRL's functions get a model that returns given log-probabilities, so that nothing but the objectives is compared.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.train.answers import Answer, pack
from lmworks.train.dpo import preference_loss
from lmworks.train.grpo import Sampled, advantages, policy_loss

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5  # TRL computes in fp32
PROMPT, LONGEST, PAIRS = 3, 9, 4
trl = pytest.importorskip("trl", minversion="1.16")


class Alone:
    """One process, as TRL's accelerator shows it."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value


def trainer(**options: Any) -> Any:
    metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
    common = {"accelerator": Alone(), "_metrics": metrics, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    return SimpleNamespace(**common, _tp_size=1, _total_train_tokens=0, current_gradient_accumulation_steps=1, **options)


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The mask of answer tokens (count, PROMPT + LONGEST), and log-probabilities of the tokens behind the first, 0 outside."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=draw)
    mask = torch.zeros(count, PROMPT + LONGEST, dtype=torch.long)
    for row, length in enumerate(lengths.tolist()):
        mask[row, PROMPT : PROMPT + length] = 1
    return mask, -torch.rand(count, PROMPT + LONGEST - 1, generator=draw) * 3 * mask[:, 1:]


def output(logps: Tensor) -> Any:
    return SimpleNamespace(log_probs=logps, entropy=logps.detach(), mean_logits=logps.detach(), is_top1=logps.detach() > -1)


@pytest.mark.parametrize("options", [{"loss": "sigmoid"}, {"loss": "ipo", "beta": 0.4}, {"loss": "sigmoid", "beta": 1.5}], ids=str)
def test_preference_losses(options: dict[str, Any]) -> None:
    from trl import DPOTrainer

    node = Dpo.model_validate(options)
    mask, logps = rows(2 * PAIRS, 1)
    reference = logps + 0.5 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(2)) * mask[:, 1:]
    logps.requires_grad_()
    theirs = trainer(
        precompute_ref_logps=True, ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[node.loss], loss_weights=[1.0],
        beta=node.beta, use_weighting=False, label_smoothing=0.0,
    )  # fmt: skip
    sums = reference.sum(1)
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": sums[:PAIRS], "ref_rejected_logps": sums[PAIRS:]}
    expected = DPOTrainer._compute_loss(theirs, lambda **_: output(logps), inputs, False)
    (gradient,) = torch.autograd.grad(expected, logps)

    def columns(values: Tensor) -> Tensor:
        return torch.stack((values[:PAIRS], values[PAIRS:]), 1).double()

    ours = preference_loss(node, columns(logps.sum(1)), columns(sums), columns(mask.sum(1)))
    (found,) = torch.autograd.grad(ours.loss, logps)
    assert ours.loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    torch.testing.assert_close(found * mask[:, 1:], gradient * mask[:, 1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo(smoothing: float) -> None:
    from trl.experimental.cpo import CPOTrainer

    node = Dpo.model_validate({"loss": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": smoothing})
    mask, logps = rows(2 * PAIRS, 3)
    lengths = mask.sum(1)
    means = (logps.sum(1) / lengths).requires_grad_()
    theirs = trainer(alpha=0.0, loss_type="simpo", beta=node.beta, simpo_gamma=node.simpo_gamma, label_smoothing=smoothing)
    losses, *_ = CPOTrainer.cpo_loss(theirs, means[:PAIRS], means[PAIRS:])
    (gradient,) = torch.autograd.grad(losses.mean(), means)

    def columns(values: Tensor) -> Tensor:
        return torch.stack((values[:PAIRS], values[PAIRS:]), 1).double()

    ours = preference_loss(node, columns(means * lengths), None, columns(lengths))
    (found,) = torch.autograd.grad(ours.loss, means)
    assert ours.loss.item() == pytest.approx(losses.mean().item(), abs=TOLERANCE)
    torch.testing.assert_close(found, gradient, atol=TOLERANCE, rtol=0)


def test_kto() -> None:
    from trl import KTOTrainer

    node = Dpo.model_validate({"loss": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8})
    mask, logps = rows(6, 4)
    other_mask, others = rows(6, 5)
    labels = torch.tensor([True, False, True, True, False, False])
    noise = torch.Generator().manual_seed(6)
    reference, other_reference = logps.sum(1) + torch.randn(6, generator=noise), others.sum(1) - 0.4 - 0.2 * torch.rand(6, generator=noise)
    logps.requires_grad_()
    theirs = trainer(
        precompute_ref_logps=True, calculate_KL=True, loss_type="kto", beta=node.beta, desirable_weight=node.desirable_weight,
        undesirable_weight=node.undesirable_weight, _compute_kl_logps=lambda model, batch: others.sum(1),
    )  # fmt: skip
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask, "label": labels,
        "KL_input_ids": torch.zeros_like(mask), "KL_attention_mask": torch.ones_like(mask), "KL_completion_mask": other_mask,
        "ref_logps": reference, "ref_KL_logps": other_reference,
    }  # fmt: skip
    expected = KTOTrainer._compute_loss(theirs, lambda **_: output(logps), inputs, False)
    (gradient,) = torch.autograd.grad(expected, logps)

    def columns(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack((first, second), 1).double()

    lengths = columns(mask.sum(1), other_mask.sum(1))
    ours = preference_loss(node, columns(logps.sum(1), others.sum(1)), columns(reference, other_reference), lengths, labels)
    (found,) = torch.autograd.grad(ours.loss, logps)
    assert ours.divergence is not None and ours.divergence > 0.1
    assert ours.loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    torch.testing.assert_close(found * mask[:, 1:], gradient * mask[:, 1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_policy_losses(loss: str, beta: float) -> None:
    """With ratios beyond both bounds, truncated importance sampling and, with beta, the divergence from a reference."""
    from trl import GRPOTrainer

    groups, size = 3, 4
    bounds = {"clip_low": 0.05, "clip_high": 0.08, "importance_cap": 1.1}
    node = Grpo.model_validate(
        {"loss": loss, "group_size": size, "beta": beta, "max_new_tokens": LONGEST} | bounds
    )
    mask, old = rows(groups * size, 7)
    mask, old = mask[:, PROMPT:], old[:, PROMPT - 1 :]
    draw = torch.Generator().manual_seed(8)
    logps, rollout, reference = (old + scale * torch.randn(old.shape, generator=draw) * mask for scale in (0.4, 0.2, 0.5))
    rewards = torch.rand(groups * size, generator=draw)
    advantages_n = advantages(node, rewards)
    logps.requires_grad_()
    theirs = trainer(
        loss_type="grpo" if loss == "gspo" else loss, importance_sampling_level="sequence" if loss == "gspo" else "token", beta=beta,
        epsilon_low=node.clip_low, epsilon_high=node.clip_high, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=True, vllm_importance_sampling_correction=True, max_completion_length=LONGEST, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, logps.detach(), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(len(mask), PROMPT), "prompt_mask": torch.ones(len(mask), PROMPT),
        "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
        "advantages": advantages_n.float(), "old_per_token_logps": old, "ref_per_token_logps": reference,
        "importance_sampling_ratio": (old - rollout).exp().clamp(max=node.importance_cap), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = GRPOTrainer._compute_loss(theirs, None, inputs)
    (gradient,) = torch.autograd.grad(expected, logps)

    lengths = mask.sum(1).tolist()
    packed = pack([Answer(torch.zeros(n + 1).int().numpy(), (torch.arange(n + 1) > 0).numpy()) for n in lengths], 2 * LONGEST, 0)

    def placed(values: Tensor) -> Tensor:
        return packed.place([row[:n].detach().numpy() for row, n in zip(values, lengths, strict=True)])

    values = placed(logps).requires_grad_()
    sampled = Sampled(placed(old), placed(rollout), placed(reference) if beta else None)
    ours = policy_loss(node, packed, values, sampled, advantages_n)
    (found,) = torch.autograd.grad(ours.loss, values)
    assert ours.loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    assert ours.clipped > 0
    torch.testing.assert_close(found, placed(gradient), atol=TOLERANCE, rtol=0)
