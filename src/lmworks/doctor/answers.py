"""Who answers the issues of a widely copied troubleshooting guide for the training of large models: a cause of the doctor, another command,
or the recipe; and advice of such guides that is wrong, with the reason. docs/troubleshooting.md is made from these tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """`cause` of an `issue`, as the guide names them. codes: the causes of the doctor that are meant. elsewhere: who else answers it."""

    issue: str
    cause: str
    codes: tuple[str, ...] = ()
    elsewhere: str = ""


_NOT_DECREASING, _SPIKES, _MEMORY, _SLOW = "loss does not decrease", "loss spikes", "out of memory", "slow training"
_FORGETTING, _OVERFITTING, _TIMEOUT, _NODE = "catastrophic forgetting", "overfitting", "NCCL timeout", "node failure"
_CHECKPOINT, _SAVING, _DATA, _LOADING = "checkpoint corruption", "slow checkpoint saving", "poor data quality", "slow data loading"
_NAN, _EXPERTS, _SCORES, _INFERENCE = "NaN loss", "expert imbalance", "low benchmark scores", "slow inference"
_MESSAGES = "error messages"

ANSWERS = (
    Answer(_NOT_DECREASING, "learning rate too low", ("learning-rate-too-low", "schedule-ends-early", "too-few-tokens", "eps-too-large")),
    Answer(_NOT_DECREASING, "bad data", ("noisy-source", "duplicated-data", "unshuffled-data", "wrong-tokenizer")),
    Answer(_NOT_DECREASING, "checkpoint loading failed", ("damaged-checkpoint", "optimizer-state-lost"),
           "a resume verifies every byte and says which checkpoint it took"),
    Answer(_NOT_DECREASING, "wrong loss mask", ("labels-all-masked", "prompt-not-masked"),
           "`lmworks data batch RUN 0` shows the labels of the first step"),
    Answer(_SPIKES, "learning rate too high", ("learning-rate-too-high", "no-warmup", "attention-logits-growing", "head-norm-growing")),
    Answer(_SPIKES, "gradient overflow", ("fp16-overflow", "no-clipping")),
    Answer(_SPIKES, "bad batch", ("bad-batch",), "`lmworks doctor RUN --find-rows 119` names the rows of step 120: batches count from 0"),
    Answer(_SPIKES, "optimizer state corrupted", ("damaged-checkpoint", "optimizer-state-lost", "silent-corruption")),
    Answer(_MEMORY, "batch too large", (), "`lmworks plan` predicts the memory of each rank, and `layout: auto` chooses the micro-batch"),
    Answer(_MEMORY, "sequences too long", (), "`lmworks plan` and `lmworks preflight`, which runs the first batch of every phase"),
    Answer(_MEMORY, "activations", (), "`lmworks plan`, which compares the policies of `train.activation_checkpointing`"),
    Answer(_MEMORY, "too little offloading", (), "`lmworks plan`, which names the layout that fits ([ZeRO with offload](deepspeed.md))"),
    Answer(_MEMORY, "fragmentation", ("memory-fragmented",)),
    Answer(_MEMORY, "host memory", ("memory-growing", "out-of-memory-killed")),
    Answer(_SLOW, "data loading", ("slow-loader",)),
    Answer(_SLOW, "CPU", ("machine-oversubscribed",)),
    Answer(_SLOW, "network", ("slow-rank",), "`lmworks health` and `lmworks preflight` measure it before a run"),
    Answer(_SLOW, "small batch", (), "`lmworks plan --calibrate` measures the speed of micro-batches"),
    Answer(_SLOW, "inefficient model", ("expert-imbalance-slow", "periodic-pause"),
           "attention without score matrices, fused operators and compilation are the defaults"),
    Answer(_FORGETTING, "too little general data, rate too high, no elastic weight consolidation", ("forgetting",),
           "`tune.replay`, `tune.learning_rate`, `tune.ewc`"),
    Answer(_OVERFITTING, "too many epochs, too little data or regularization", ("overfitting", "validation-gap", "duplicated-data")),
    Answer(_TIMEOUT, "a rank does not arrive", ("hung-rank", "hung-collective", "dead-rank", "save-timeout"),
           "the terminal and the ledger name the rank, its host and the collective"),
    Answer(_TIMEOUT, "network or firewall", (), "`lmworks health` and `lmworks preflight` test ports and bandwidth between ranks"),
    Answer(_NODE, "a node fails", ("dead-rank", "out-of-memory-killed"),
           "`lmworks launch` restarts the ranks, excludes a host that fails again, and takes a spare"),
    Answer(_CHECKPOINT, "files damaged or incomplete", ("damaged-checkpoint", "disk-full"), "`lmworks ckpt verify RUN`"),
    Answer(_SAVING, "slow storage, saving too often", ("slow-saves", "disk-full")),
    Answer(_DATA, "noise, duplicates, too little good text", ("noisy-source", "duplicated-data", "missing-domain", "stalled-domain"),
           "`lmworks corpus analyze` shows what a corpus consists of"),
    Answer(_LOADING, "few workers, slow storage, no cache", ("slow-loader",),
           "`lmworks health` measures disks; `shards.cache` keeps a copy"),
    Answer(_NAN, "numerical instability", ("fp16-overflow", "operator-overflow")),
    Answer(_NAN, "exploding gradient", ("no-clipping", "learning-rate-too-high")),
    Answer(_NAN, "bad initialization", ("init-too-wide",)),
    Answer(_NAN, "bad data", ("bad-batch",)),
    Answer(_EXPERTS, "no balancing, or with the wrong strength", ("experts-collapsed", "bias-rate-too-high", "expert-imbalance-slow"),
           "`lmworks doctor RUN --experts FILE` shows which experts a text uses"),
    Answer(_SCORES, "too little training", ("too-few-tokens", "learning-rate-too-low"), "`lmworks plan` predicts the loss of more tokens"),
    Answer(_SCORES, "poor data", ("noisy-source", "missing-domain")),
    Answer(_SCORES, "hyperparameters", (), "`lmworks ablate` compares them over seeds"),
    Answer(_SCORES, "a fault of the evaluation", ("validation-leak",),
           "`lmworks evaluate` scores chance and references beside the model ([Evaluate and compare models](evaluation.md))"),
    Answer(_INFERENCE, "engine, quantization, batch size, parallelism", (),
           "`lmworks speed`, `lmworks quantize` and `lmworks deploy` ([Deploy a model](deploying.md))"),
    Answer(_MESSAGES, "connection refused", ("dead-rank",), "`lmworks health` tests the ports between hosts"),
    Answer(_MESSAGES, "tensor of another type, shape or device", (),
           "the recipe is refused before a run; otherwise it is a bug: `lmworks bundle`"),
    Answer(_MESSAGES, "no module of this name", (), "`lmworks preflight` lists missing packages; the error names the extra"),
)  # fmt: skip

REFUSED = (
    ("raise the timeout of collectives to two hours",
     "it hides the rank that is missing, and costs two hours for each failure; the ledger names the rank after `launch.timeout`"),
    ("set `NCCL_TIMEOUT` in milliseconds", "NCCL has no such variable; the timeout is that of the process group, `launch.timeout`"),
    ("kill every Python process, reset the GPUs",
     "it ends the work of others on the machine; `lmworks launch` ends the ranks of its own run, and `lmworks health` names stale "
     "processes"),
    ("delete the output folder and start afresh", "it deletes what the cause could be found by; `lmworks bundle` first"),
    ("compare md5 sums of checkpoints by hand", "each file has a BLAKE3 hash in its manifest: `lmworks ckpt verify`"),
    ("dropout 0.2 against overfitting in pretraining",
     "with one to four passes over the text it costs quality; fewer epochs, more text and `train.early_stopping` act on the cause"),
    ("ignore the padding id in the loss",
     "where the padding token is also the end token, the model never learns to stop; masks are by position"),
    ("reset the optimizer state after a spike",
     "the moments are needed: a reset is a fault of its own, `optimizer-state-lost`; roll back instead"),
)  # fmt: skip
"""Advice, and why it is not ours."""
