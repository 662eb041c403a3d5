"""The fixed names of all metrics, each with its unit and meaning.

A part in braces stands for one name part: `validation/{domain}/bits_per_byte` covers `validation/code/bits_per_byte`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """One metric. `unit` is empty for pure numbers. `when` says what a run must have for it to be written; every run writes the others.
    `better` says which values are better, if one can say so."""

    name: str
    unit: str
    meaning: str
    when: str = ""
    better: Literal["lower", "higher", ""] = ""


ELAPSED = "perf/elapsed_seconds"
_MOE = "model.moe"
DETAIL = "metrics.detail_every; of a run of 50 steps or more also steps 1, 10 and 100, and the step after an event"
_NEEDLE = "a phase with needle"
_EVALUATION = "evaluate.benchmarks and evaluate.every"
_SCORE = "eval/{set}/{form}"
_LATER = "tune, dpo or grpo"
_DPO, _KTO, _GRPO = "dpo", "dpo.loss: kto", "grpo"
_NVML = "an NVIDIA GPU and lmworks[gpu]"
_CUDA = "an NVIDIA GPU"
_RANKS = "several ranks"
_QK_CLIP = "optimizer.qk_clip_threshold"
OWN = "no train.deepspeed"
HEAD = "model.tie_word_embeddings: false"
SOURCES = "pretrain or tune, with at most 64 sources"
PRESSURE = "a kernel with pressure stall information"
GROUP = "a control group of the CPU"
KILLS = "a kernel that counts kills for want of memory"
DISKS, NETWORK = "a system that counts transfers of disks", "a system that counts transfers of the network"
_TABLE: tuple[tuple[Any, ...], ...] = (
    (
        "train/loss", "nats/token", "cross-entropy of the step, over the valid tokens of all ranks and micro-batches; in dpo and grpo the "
        "value of their objective, without a unit", "", "lower",
    ),
    ("train/perplexity", "", "exp of train/loss", "", "lower"),
    ("dpo/reward_chosen", "", "mean reward of the chosen answers of the step, beta times the log-ratio to the reference", _DPO),
    ("dpo/reward_rejected", "", "the same of the rejected answers", _DPO),
    ("dpo/margin", "", "mean reward of the chosen answers minus that of the rejected ones", _DPO, "higher"),
    ("dpo/accuracy", "", "share of the pairs of the step whose chosen answer has the larger reward; a tie counts as half", _DPO, "higher"),
    ("dpo/divergence", "nats", "divergence from the reference that kto estimates from answers to other prompts", _KTO),
    ("train/z_loss", "nats^2/token", "squared log-partition of the head, before its weight"),
    ("train/auxiliary_loss", "", "router losses of the step, before their weight", _MOE),
    (
        "train/mtp_loss", "nats/token", "cross-entropy of multi-token prediction, mean over its layers, over the valid tokens of the step",
        "model.mtp", "lower",
    ),
    ("train/tokens", "tokens", "tokens trained on since the start of the run, this step included"),
    ("train/batch_tokens", "tokens", "tokens of this step"),
    ("train/valid_tokens", "tokens", "tokens of this step that carry loss"),
    ("train/sequence_length", "tokens", "length of each sequence of this step"),
    ("train/phase", "", "number of the phase, from 0"),
    ("train/bad_steps", "steps", "steps without an update since the start, because a value was not finite"),
    ("train/spikes", "steps", "steps without an update since the start, because loss or gradient norm was far above the last ones"),
    (
        "train/source/{source}/loss", "nats/token", "cross-entropy of the step over the valid tokens of a source of the mixture, or of a "
        "set of tune.data", SOURCES, "lower",
    ),
    (
        "train/effective_sources", "", "exp of the entropy of the sources of the step's valid tokens: 1 if all are from one source",
        SOURCES,
    ),
    ("train/repeated_rows", "", "share of the first rank's sequences since the line before that equal one of its last 65,536"),
    ("train/shared_rows", "", "share of the sequences of a step that several ranks have read", _RANKS, "lower"),
    ("train/ewc", "nats/token", "penalty of elastic weight consolidation, weight included", "a phase with ewc"),
    (
        "attention/logit_max", "", "largest score of attention of the step, before the softmax, over all heads, layers and ranks", _QK_CLIP,
        "lower",
    ),
    ("attention/logit_max/{layer}", "", "the same in a layer", _QK_CLIP, "lower"),
    (
        "attention/logit_max/{layer}/{head}", "", "the same of a head", f"{_QK_CLIP}, and {DETAIL}", "lower",
    ),
    ("attention/clipped_heads", "heads", "heads with a score above the threshold in this step, whose weights were scaled down", _QK_CLIP),
    ("experts/load_cv", "", "coefficient of variation of the experts' loads, mean over layers", _MOE),
    ("experts/load_cv/{layer}", "", "coefficient of variation of the experts' loads in a layer", _MOE),
    ("experts/load_max", "", "load of the busiest expert relative to the mean, largest over layers", _MOE),
    ("experts/load_max/{layer}", "", "load of the busiest expert relative to the mean in a layer", _MOE),
    ("experts/load_min", "", "load of the idlest expert relative to the mean, smallest over layers", _MOE),
    ("experts/load_min/{layer}", "", "load of the idlest expert relative to the mean in a layer", _MOE),
    ("experts/dead", "experts", "experts that got no token this step, over all layers", _MOE),
    ("experts/dead/{layer}", "experts", "experts that got no token this step in a layer", _MOE),
    ("experts/overflow", "", "share of the routed tokens above the capacity factor", _MOE),
    ("experts/overflow/{layer}", "", "share of the routed tokens above the capacity factor in a layer", _MOE),
    ("experts/bias_max", "", "largest absolute selection bias over layers", _MOE),
    ("experts/bias_max/{layer}", "", "largest absolute selection bias in a layer", _MOE),
    ("experts/temperature", "", "router temperature", "model.moe.temperature_steps"),
    ("optim/learning_rate", "", "rate of the matrices at this step"),
    ("optim/adam_learning_rate", "", "rate of what AdamW trains under muon"),
    ("optim/grad_norm", "", "global gradient norm before clipping"),
    (
        "optim/grad_rms/{group}", "", "root mean square of the gradients of a group before clipping: embedding, head, matrices, experts, "
        "router, vectors", OWN,
    ),
    ("optim/embedding_norm", "", "norm of the weights of the embedding", OWN),
    ("optim/head_norm", "", "norm of the weights of the head", HEAD),
    ("optim/clipped", "", "1 where the gradient was clipped"),
    ("optim/loss_scale", "", "dynamic loss scale of fp16", "train.precision: fp16"),
    ("optim/weight_norm", "", "global norm of the weights", DETAIL),
    ("optim/update_ratio", "", "norm of the update relative to the norm of the weights before it", DETAIL),
    ("optim/unchanged_weights", "", "share of the trained weights that the step has left as they were, to the bit", DETAIL),
    ("layers/{layer}/activation_rms", "", "root mean square of what leaves a layer, over some rows of the first rank", DETAIL),
    ("layers/{layer}/attention_logit_max", "", "largest attention score before the softmax, over the same rows", DETAIL),
    ("layers/{layer}/grad_norm", "", "norm of the gradients of a layer, after clipping", DETAIL),
    ("layers/{layer}/update_ratio", "", "norm of a layer's update relative to the norm of its weights", DETAIL),
    ("perf/tokens_per_second", "tokens/s", "since the previous metrics line, without saves and validation", "", "higher"),
    (ELAPSED, "s", "since the process began to train, by a clock that is never set: differences of `time` may be corrections"),
    ("perf/step_seconds", "s", "wall time of the step", "", "lower"),
    ("perf/mfu", "", "model FLOPs relative to the measured matrix-multiply peak of the machine", "", "higher"),
    ("perf/gpu_utilization", "", "share of the last second in which the GPU of the first rank computed, by NVML", _NVML, "higher"),
    ("perf/memory", "bytes", "largest memory since the stage began: of the GPU, or else resident memory of the process", "", "lower"),
    ("perf/data_wait", "s", "time that the step waited for its batch", "", "lower"),
    ("perf/save_seconds", "s", "time that training stood still for a checkpoint", "", "lower"),
    ("perf/validation_seconds", "s", "time that training stood still for validation", "", "lower"),
    ("perf/evaluation_seconds", "s", "time that training stood still for an evaluation", _EVALUATION, "lower"),
    (
        "perf/gap_seconds", "s", "wall time since the line before that steps, saves, validation, evaluation and samples do not explain", "",
        "lower",
    ),
    ("perf/cpu_seconds", "s", "processor time of the first rank, of all its threads, since the line before"),
    ("perf/resident_memory", "bytes", "memory of the first rank's process that is resident now"),
    ("perf/memory_reserved", "bytes", "memory of the first rank's GPU that the allocator holds, in use or not", _CUDA),
    ("perf/alloc_retries", "", "allocations since the line before that only succeeded after cached memory was freed", _CUDA, "lower"),
    ("perf/slowest_rank", "", "number of the rank that holds up the others most", _RANKS),
    (
        "perf/slowest_excess", "", "by how much of a step that rank exceeds the median of all (of two, the other), in its arithmetic and "
        "its time outside of collectives", _RANKS, "lower",
    ),
    ("perf/data_wait_max", "s", "perf/data_wait of the rank that waited longest", _RANKS, "lower"),
    ("perf/starved_rank", "", "number of that rank", _RANKS),
    ("system/cpu", "%", "use of the CPU cores of the first rank's machine, by all programs, since the line before"),
    ("system/memory", "bytes", "memory in use on the first rank's machine, by all programs"),
    ("system/load", "", "tasks that run or wait for a CPU on the first rank's machine, per CPU"),
    ("system/cpu_pressure", "", "share of the time since the last reading in which some task waited for a CPU", PRESSURE, "lower"),
    ("system/memory_pressure", "", "the same for memory: pages are being reclaimed or read back", PRESSURE, "lower"),
    ("system/io_pressure", "", "the same for disks", PRESSURE, "lower"),
    ("system/throttled_seconds", "s", "CPU time that the quota of the container withheld since the last reading, all CPUs", GROUP, "lower"),
    ("system/oom_kills", "", "processes of the container killed for want of memory since the last reading", KILLS, "lower"),
    ("system/network_bytes_per_second", "bytes/s", "sent and received by the first rank's machine, by all programs", NETWORK),
    ("system/disk_read_bytes_per_second", "bytes/s", "read from the disks of the first rank's machine, by all programs", DISKS),
    ("system/disk_write_bytes_per_second", "bytes/s", "written to the disks of the first rank's machine, by all programs", DISKS),
    ("system/gpu_throttled", "", "1 if heat or the hardware holds the clocks of the GPU down, else 0", _NVML, "lower"),
    ("system/gpu_errors", "", "XID errors and uncorrected memory errors of the GPU since the last reading", _NVML, "lower"),
    ("system/gpu_temp", "degrees C", "temperature of the GPU", _NVML),
    ("system/power", "W", "power drawn by the GPU", _NVML),
    (
        "validation/loss", "nats/token", "mean over all validation tokens; in dpo its objective on the held-out pairs, without a unit", "",
        "lower",
    ),
    ("grpo/reward", "", "mean reward of the answers that were drawn in the step", _GRPO, "higher"),
    ("grpo/solved", "", "share of the answers with the full reward", _GRPO, "higher"),
    ("grpo/wrong", "", "share of the answers that were judged and did not get the full reward", _GRPO),
    ("grpo/empty", "", "share of the answers without text, which earn nothing", _GRPO),
    ("grpo/truncated", "", "share of the answers that were cut at grpo.max_new_tokens, which earn nothing", _GRPO),
    ("grpo/unparsed", "", "share of the answers whose form the reward could not read", _GRPO),
    ("grpo/failed", "", "share of the answers on which the reward raised an error or took too long", _GRPO, "lower"),
    ("grpo/answer_tokens", "tokens", "mean length of the answers", _GRPO),
    ("grpo/surprise", "nats/token", "mean of -log of the probability that the tokens were drawn with, an estimate of the entropy", _GRPO),
    ("grpo/groups", "groups", "groups that were drawn in the step", _GRPO),
    ("grpo/trained_groups", "groups", "groups that were trained on in the step", _GRPO),
    ("grpo/equal_groups", "", "share of the drawn groups whose rewards are equal, which teach nothing", _GRPO),
    ("grpo/no_signal", "", "1 if the rewards of all drawn groups are equal, so that the step teaches nothing, else 0", _GRPO, "lower"),
    ("grpo/mismatch_mean", "", "distance from 1 of the ratio of a token's probabilities in training and rollout, mean over tokens", _GRPO),
    ("grpo/mismatch_max", "", "the same, the largest", _GRPO, "lower"),
    ("grpo/clipped", "", "share of the tokens whose ratio is clipped, mean over the updates of the step", _GRPO),
    ("grpo/divergence", "nats/token", "divergence from the model at the start (k3)", "grpo.beta"),
    ("perf/rollout_seconds", "s", "time for drawing and judging the answers of the step", _GRPO, "lower"),
    ("validation/reward", "", "mean reward of one answer to each held-out prompt", _GRPO, "higher"),
    ("validation/wrong", "", "share of held-out prompts whose answer does not get the full reward", _GRPO, "lower"),
    ("validation/reward_accuracy", "", "dpo/accuracy on held-out pairs", _DPO, "higher"),
    ("validation/reward_margin", "", "dpo/margin on held-out pairs", _DPO, "higher"),
    ("validation/bits_per_byte", "bits/byte", "over all validation text", "", "lower"),
    (
        "validation/general_bits_per_byte", "bits/byte", "over a little general text, beside the stage's own validation", _LATER, "lower",
    ),
    ("validation/forgetting", "bits/byte", "rise of validation/general_bits_per_byte since the stage began", _LATER, "lower"),
    (
        "validation/position/{start}", "nats/token", "mean loss of the tokens from this position of their document to four times it", "",
        "lower",
    ),
    (
        "needle/accuracy", "", "share of hidden facts whose value the model found likelier than those of the others in the row", _NEEDLE,
        "higher",
    ),
    ("needle/chance", "", "the same by guessing", _NEEDLE),
    ("needle/{length}/{depth}", "", "the same in rows of a length, for facts behind so many per cent of the text", _NEEDLE, "higher"),
    ("eval/{set}/bits_per_byte", "bits/byte", "of the right answers of a sample of the set, in cloze form", _EVALUATION, "lower"),
    ("eval/{set}/items", "items", "items in this sample", _EVALUATION),
    ("eval/{set}/chance", "", "share of this sample that a blind guess gets right, the mean of 1 / number of choices", _EVALUATION),
    (
        _SCORE, "", "share of a sample of the set that is right, the likeliest choice per byte counting as the answer",
        _EVALUATION, "higher",
    ),
    ("validation/{domain}/loss", "nats/token", "mean over a domain's validation tokens", "", "lower"),
    ("validation/{domain}/bits_per_byte", "bits/byte", "over a domain's validation text", "", "lower"),
)

METRICS: dict[str, Metric] = {row[0]: Metric(*row) for row in _TABLE}
_PATTERNS = [
    (re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)) + r"\Z"), metric) for name, metric in METRICS.items() if "{" in name
]


@cache
def describe(name: str) -> Metric:
    """The metric with this name. Raises `KeyError` for names that are not in the table."""
    if name in METRICS and "{" not in name:
        return METRICS[name]
    for pattern, metric in _PATTERNS:
        if pattern.match(name):
            return metric
    raise KeyError(f"{name!r} is no metric of lmworks.metrics.names; add it there with its unit and meaning")


def is_score(name: str) -> bool:
    """Whether this is the score of a benchmark set during training."""
    try:
        return describe(name).name == _SCORE
    except KeyError:
        return False
