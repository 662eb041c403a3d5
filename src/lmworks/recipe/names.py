"""Names of recipe keys elsewhere: those that lmworks gave them before, and those of other tools.

A recipe with such a name is refused with the key to use. `FORMER` also translates what an earlier version has stored: recipes in run
directories and in checkpoints, and the inputs of finished stages (`lmworks.recipe.former`). The documentation's tables for people who come
from another tool are made from `FOREIGN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORMER: dict[str, dict[str, str]] = {
    "Balance": {
        "update": "bias_update", "rate": "bias_update_rate", "clamp": "bias_clamp", "aux_weight": "aux_loss_weight",
        "sequence_aux_weight": "sequence_aux_loss_weight",
    },
    "BatchRamp": {"start": "start_tokens"},
    "Cache": {"bytes": "max_bytes", "ahead": "prefetch"},
    "ChatData": {"form": "story_form", "count": "max_rows"},
    "Cluster": {"dollars_per_hour": "dollars_per_device_hour", "watts": "watts_per_device"},
    "Code": {"errors": "max_error_fraction", "seconds": "timeout"},
    "Corpus": {"max_document": "max_document_bytes", "validation_bytes": "max_validation_bytes"},
    "Decontaminate": {"gate": "action", "ngram": "ngram_words"},
    "Dpo": {"held_out_fraction": "validation_fraction"},
    "Executor": {"jobs": "max_jobs", "running": "max_running_jobs", "time": "time_limit", "max_running": "max_running_jobs"},
    "Fim": {"spm": "spm_rate"},
    "Forgetting": {"warn_above": "warn_bits_per_byte", "stop_above": "stop_bits_per_byte"},
    "Grpo": {"held_out": "validation_prompts"},
    "LadderFile": {"decay": "decay_fraction", "warmup": "warmup_fraction"},
    "Language": {"minimum": "min_probability", "keep": "languages"},
    "Launch": {"grace": "grace_period", "exclude_after": "exclude_after_failures"},
    "Layout": {
        "schedule": "pipeline_schedule", "stages_per_rank": "pipeline_stages_per_rank", "layers_per_stage": "layers_per_pipeline_stage",
    },
    "Lines": {"shortest": "min_characters", "min_length": "min_characters", "across": "across_documents"},
    "LrSchedule": {"final": "min_lr_ratio", "drops": "milestone_fractions", "drop_factor": "gamma", "milestones": "milestone_fractions"},
    "Math": {"tolerance": "relative_tolerance"},
    "Metrics": {"dollars_per_hour": "dollars_per_device_hour", "watts": "watts_per_device"},
    "Minhash": {"ngram": "ngram_words"},
    "Mla": {
        "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "nope_dim": "qk_nope_head_dim",
        "value_dim": "v_head_dim", "norm_eps": "rms_norm_eps",
    },
    "Model": {
        "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn_size": "intermediate_size",
        "qk_norm": "use_qk_norm", "tie_embeddings": "tie_word_embeddings", "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
        "logit_softcap": "final_logit_softcapping", "z_loss": "z_loss_weight", "dropout": "residual_dropout",
        "max_length": "max_position_embeddings", "nope_every": "no_rope_layer_interval",
    },
    "Moe": {
        "experts": "n_routed_experts", "top_k": "num_experts_per_tok", "expert_size": "moe_intermediate_size",
        "shared_experts": "n_shared_experts", "dense_layers": "first_k_dense_replace", "gate": "scoring_func",
        "normalize_top_k": "norm_topk_prob", "routed_scale": "routed_scaling_factor", "groups": "n_group", "top_groups": "topk_group",
    },
    "Mtp": {"layers": "num_nextn_predict_layers", "weight": "loss_weight"},
    "Optimizer": {"clip": "max_grad_norm", "layer_decay": "layer_lr_decay", "ema": "ema_decay"},
    "Phase": {
        "batch": "global_batch_tokens", "ramp": "batch_ramp", "schedule": "lr_schedule", "balance_rate": "bias_update_rate",
        "mtp_weight": "mtp_loss_weight", "global_batch_size": "global_batch_tokens",
    },
    "PreferenceData": {"count": "max_rows"},
    "Repeats": {"length": "min_words", "largest": "max_fraction", "min_length": "min_words"},
    "Replay": {"share": "fraction"},
    "RewardTask": {"count": "max_rows", "seconds": "timeout"},
    "Rewrite": {"key_from": "api_key_env"},
    "Rope": {"fraction": "partial_rotary_factor", "original_length": "original_max_position_embeddings"},
    "RopeChange": {"original_length": "original_max_position_embeddings"},
    "Semantic": {"per_cluster": "documents_per_cluster"},
    "Slurm": {"time": "time_limit"},
    "Source": {"licence": "license", "layout": "document_format", "infill": "fim", "keep": "fact_keys"},
    "Spike": {
        "lower_to": "reduced_lr_factor", "lower_steps": "reduced_lr_steps", "window": "window_steps", "threshold": "threshold_mads",
        "floor": "min_rise_nats",
    },
    "Stability": {"starved_share": "starved_fraction", "slow_threshold": "slow_threshold_mads"},
    "Substring": {
        "length": "min_words", "minimum": "min_remaining_fraction", "min_length": "min_words", "min_remaining": "min_remaining_fraction",
    },
    "Tokenizer": {"keep": "as_is", "special_tokens": "num_special_tokens"},
    "Train": {
        "micro_batch": "micro_batch_sequences", "head_chunk": "logit_chunk_tokens", "seconds_between_saves": "save_every_time",
        "micro_batch_size": "micro_batch_sequences", "logit_chunk_size": "logit_chunk_tokens",
        "validate_bytes_per_domain": "validation_bytes_per_domain", "save_every_seconds": "save_every_time",
    },
    "Tune": {
        "batch": "global_batch_tokens", "schedule": "lr_schedule", "global_batch_size": "global_batch_tokens", "keep": "final_weights",
    },
}  # fmt: skip
"""By the class of the section: each former key, with the key that it is now."""

MOVED = {"Train": {"init_from": "start_from"}}
"""By the class of the section: keys that stand at the top of the recipe now, each with its name there."""

_NO_SCALE = {"learning_rate_scale": "set learning_rate, the peak rate itself, which was this times optimizer.learning_rate"}
REMOVED = {"Tune": _NO_SCALE, "Dpo": _NO_SCALE, "Grpo": _NO_SCALE}
"""By the class of the section: former keys that no single key replaces, each with what to do instead."""


@dataclass(frozen=True)
class Conversion:
    """How the value of a key is written now, and how it was written before."""

    now: Callable[[Any], Any]
    before: Callable[[Any], Any]


CONVERTED = {
    ("RewardTask", "seconds"): Conversion(lambda seconds: f"{seconds} s", lambda text: float(text.removesuffix(" s"))),
    ("Train", "validate_bytes_per_domain"): Conversion(lambda number: f"{number} bytes", lambda text: int(text.removesuffix(" bytes"))),
}
"""Former keys, by class and name, whose values were of another form in resolved recipes."""


@dataclass(frozen=True)
class Ours:
    """What stands for a key of another tool: dotted paths, in which NAME is the name of any item, and what else to know."""

    keys: tuple[str, ...] = ()
    note: str = ""


def _ours(*keys: str, note: str = "") -> Ours:
    return Ours(keys, note)


def _later(key: str, *before: str, note: str = "") -> Ours:
    """A key that each of the stages after pretraining has."""
    return Ours((*before, *(f"{stage}.{key}" for stage in ("tune", "dpo", "grpo"))), note)


_PHASE, _MOE, _LAYOUT = "train.phases.NAME.", "model.moe.", "layout."
_GROUP_RATE = _ours("optimizer.adam_learning_rate", "optimizer.lr_scales", note="lr_scales are factors on it, such as {embedding: 4}")
_MICRO = _ours("train.micro_batch_sequences", note="it changes speed and memory only; global_batch_tokens is the batch of a step")
_ACCUMULATION = _ours(
    _PHASE + "global_batch_tokens", "tune.global_batch_tokens", "dpo.pairs_per_step", "grpo.prompts_per_step",
    note="a step accumulates whatever micro-batches of all ranks make up this batch",
)  # fmt: skip
_GLOBAL = _ours(
    _PHASE + "global_batch_tokens", "tune.global_batch_tokens", "dpo.pairs_per_step", "grpo.prompts_per_step",
    note="in tokens: sequences times sequence_length",
)  # fmt: skip
_EPOCHS = _ours("tune.epochs", "dpo.epochs", _PHASE + "tokens", note="pretraining has a budget of tokens")
_STEPS = _ours(_PHASE + "tokens", "tune.tokens", "grpo.steps", note="a budget of tokens: steps times global_batch_tokens")
_LR = _later("learning_rate", "optimizer.learning_rate")
_SCHEDULE = _later("lr_schedule.kind", _PHASE + "lr_schedule.kind")
_WARMUP = _later("lr_schedule.warmup", _PHASE + "lr_schedule.warmup", note="a share such as 3%, or steps or tokens with their unit")
_DECAY = _later("lr_schedule.decay", _PHASE + "lr_schedule.decay", note="a share such as 20%, or steps or tokens with their unit")
_MIN_LR = _later("lr_schedule.min_lr_ratio", _PHASE + "lr_schedule.min_lr_ratio", note="as a share of the peak rate")
_LENGTH = _later("sequence_length", _PHASE + "sequence_length")
_ADAM = _ours("optimizer.betas", note="both, as [0.9, 0.95]")
_OPTIMIZER = _ours("optimizer.kind", note="muon or adamw")
_SAVE = _ours("train.save_every", note="such as 500 steps or 10%")
_KEEP = _ours("checkpoints.keep_last")
_VALIDATE = _ours("train.validate_every", note="such as 500 steps or 10%")
_LOG = _ours("train.log_every", note="such as 10 steps")
_VALIDATION = _ours("tune.validation_fraction", "dpo.validation_fraction", "grpo.validation_prompts", "corpus.validation_fraction")
_PRECISION = _ours("train.precision")
_RECOMPUTE = _ours("train.activation_checkpointing")
_SEED = _ours("train.seed", note="seed, at the top, is also that of corpus and tokenizer")
_RUN_DIR = _ours("run_dir")
_WANDB = _ours("metrics.wandb_project")
_DATASETS = _ours("tune.data", "dpo.data", "grpo.data", "corpus.sources", note="corpus.sources is raw text")
_RESUME = _ours(note="a run resumes by itself: give the same command again")
_FSDP = _ours("layout.zero", "layout.dp_shard")
_BASE = _ours("start_from")
_PACKING = _ours("shards.packing", note="pretraining; conversations are always packed, and attention ends at their borders")
_STOPPING = _later("early_stopping.patience", "train.early_stopping.patience")
_ANSWERS = _ours("tune.data.NAME.answers", note="only tokens of the assistant are trained; answers says of which turns")
_TEMPLATE = _ours("tokenizer.chat_template")
_LORA = {key: _later(f"lora.{key}") for key in ("rank", "alpha", "dropout", "targets", "rslora", "init_from")}
_ADAPTER = _later("lora", note="a section with rank, alpha, dropout and targets")
_GENERATIONS = _ours("grpo.group_size")
_NEW_TOKENS = _ours("grpo.max_new_tokens")
_FROZEN = _ours(note="weights stay fp32 in training, also under adapters; lmworks quantize comes after it")

FOREIGN: dict[str, dict[str, Ours]] = {
    "transformers": {
        "per_device_train_batch_size": _MICRO, "per_device_eval_batch_size": _MICRO, "auto_find_batch_size": _MICRO,
        "gradient_accumulation_steps": _ACCUMULATION, "num_train_epochs": _EPOCHS, "max_steps": _STEPS, "learning_rate": _LR,
        "lr_scheduler_type": _SCHEDULE, "lr_scheduler_kwargs": _SCHEDULE, "warmup_ratio": _WARMUP, "warmup_steps": _WARMUP,
        "weight_decay": _ours("optimizer.weight_decay"), "adam_beta1": _ADAM, "adam_beta2": _ADAM, "adam_epsilon": _ours("optimizer.eps"),
        "max_grad_norm": _ours("optimizer.max_grad_norm"), "optim": _OPTIMIZER, "bf16": _PRECISION, "fp16": _PRECISION,
        "gradient_checkpointing": _RECOMPUTE, "torch_compile": _ours("train.compile"), "save_steps": _SAVE, "save_strategy": _SAVE,
        "save_total_limit": _KEEP, "eval_steps": _VALIDATE, "eval_strategy": _VALIDATE, "logging_steps": _LOG,
        "load_best_model_at_end": _ours("tune.final_weights", "checkpoints.keep_best", note="final_weights: best"),
        "metric_for_best_model": _later("early_stopping.metric", "train.early_stopping.metric"), "early_stopping_patience": _STOPPING,
        "early_stopping_threshold": _later("early_stopping.min_delta", "train.early_stopping.min_delta"), "data_seed": _SEED,
        "output_dir": _RUN_DIR, "run_name": _ours("name"), "report_to": _ours("metrics.wandb_project", "metrics.tensorboard"),
        "resume_from_checkpoint": _RESUME, "fsdp": _FSDP, "fsdp_config": _FSDP, "ddp_timeout": _ours("launch.timeout"),
        "label_smoothing_factor": _ours("dpo.label_smoothing"), "model_name_or_path": _BASE, "train_file": _DATASETS,
        "dataset_name": _DATASETS, "validation_split_percentage": _VALIDATION, "block_size": _LENGTH, "full_determinism": _ours(
            "train.deterministic"),
        "max_new_tokens": _NEW_TOKENS, "attn_implementation": _ours(note="attention is chosen by the device; nothing is to be set"),
    },
    "trl": {
        "max_length": _LENGTH, "max_seq_length": _LENGTH, "packing": _PACKING, "packing_strategy": _PACKING, "padding_free": _PACKING,
        "assistant_only_loss": _ANSWERS, "completion_only_loss": _ANSWERS, "dataset_text_field": _ours("corpus.sources.NAME.text_key"),
        "chat_template_path": _TEMPLATE, "dataset_num_proc": _ours("corpus.processes"), "beta": _ours("dpo.beta", "grpo.beta"),
        "loss_type": _ours("dpo.loss", "grpo.loss"), "reference_free": _ours("dpo.loss", note="simpo has no reference"),
        "simpo_gamma": _ours("dpo.simpo_gamma"), "cpo_alpha": _ours("dpo.loss"), "label_smoothing": _ours("dpo.label_smoothing"),
        "max_prompt_length": _ours("dpo.sequence_length", "grpo.sequence_length", note="prompt and answer together"),
        "max_completion_length": _NEW_TOKENS, "desirable_weight": _ours("dpo.desirable_weight"),
        "undesirable_weight": _ours("dpo.undesirable_weight"), "num_generations": _GENERATIONS,
        "generation_batch_size": _ours("grpo.prompts_per_step", note="in prompts, of group_size answers each"),
        "num_iterations": _ours("grpo.updates_per_rollout"), "steps_per_generation": _ours("grpo.updates_per_rollout"),
        "epsilon": _ours("grpo.clip_low", "grpo.clip_high"), "epsilon_high": _ours("grpo.clip_high"), "scale_rewards": _ours("grpo.loss"),
        "importance_sampling_level": _ours("grpo.loss", note="gspo has the ratio of whole answers"),
        "vllm_importance_sampling_cap": _ours("grpo.importance_cap"), "reward_funcs": _ours("grpo.data.NAME.reward", "grpo.data.NAME.file"),
        "mask_truncated_completions": _NEW_TOKENS, "use_vllm": _ours(note="rollouts are drawn by the trained model itself"),
        "ref_model": _ours(note="the reference is the model that the stage starts from"),
        "precompute_ref_log_probs": _ours(note="log-probabilities of the reference are computed once, before the first step"),
    },
    "peft": {
        "r": _LORA["rank"], "lora_alpha": _LORA["alpha"], "lora_dropout": _LORA["dropout"], "target_modules": _LORA["targets"],
        "use_rslora": _LORA["rslora"], "peft_config": _ADAPTER, "load_in_4bit": _FROZEN, "load_in_8bit": _FROZEN,
    },
    "axolotl": {
        "base_model": _BASE, "datasets": _DATASETS, "test_datasets": _VALIDATION, "val_set_size": _VALIDATION, "sequence_len": _LENGTH,
        "sample_packing": _PACKING, "eval_sample_packing": _PACKING, "pad_to_sequence_len": _PACKING, "micro_batch_size": _MICRO,
        "gradient_accumulation_steps": _ACCUMULATION, "num_epochs": _EPOCHS, "max_steps": _STEPS, "optimizer": _OPTIMIZER,
        "lr_scheduler": _SCHEDULE, "learning_rate": _LR, "cosine_min_lr_ratio": _MIN_LR, "warmup_steps": _WARMUP, "warmup_ratio": _WARMUP,
        "adapter": _ADAPTER, "lora_r": _LORA["rank"], "lora_alpha": _LORA["alpha"], "lora_dropout": _LORA["dropout"],
        "lora_target_modules": _LORA["targets"], "lora_target_linear": _LORA["targets"], "lora_model_dir": _LORA["init_from"],
        "peft_use_rslora": _LORA["rslora"], "load_in_4bit": _FROZEN, "load_in_8bit": _FROZEN, "train_on_inputs": _ANSWERS,
        "roles_to_train": _ANSWERS, "train_on_eos": _ANSWERS, "chat_template": _TEMPLATE, "tokens": _ours("tokenizer.add_tokens"),
        "added_tokens_overrides": _ours("tokenizer.add_tokens"), "special_tokens": _ours("tokenizer.add_tokens"),
        "gradient_checkpointing": _RECOMPUTE, "flash_attention": _ours(note="attention is chosen by the device; nothing is to be set"),
        "evals_per_epoch": _VALIDATE, "saves_per_epoch": _SAVE, "output_dir": _RUN_DIR, "wandb_project": _WANDB,
        "dataset_prepared_path": _RUN_DIR, "early_stopping_patience": _STOPPING, "deepspeed": _ours("train.deepspeed"),
        "rl": _ours("dpo.loss", "grpo.loss", note="a section dpo or grpo adds the stage"), "rl_beta": _ours("dpo.beta", "grpo.beta"),
        "dpo_label_smoothing": _ours("dpo.label_smoothing"), "pretraining_dataset": _ours("corpus.sources"),
    },
    "megatron": {
        "micro_batch_size": _MICRO, "global_batch_size": _GLOBAL, "rampup_batch_size": _ours(_PHASE + "batch_ramp"), "seq_length": _LENGTH,
        "train_iters": _STEPS, "train_samples": _STEPS, "lr": _LR, "min_lr": _MIN_LR, "lr_decay_style": _SCHEDULE,
        "lr_warmup_iters": _WARMUP, "lr_warmup_fraction": _WARMUP, "lr_warmup_samples": _WARMUP, "lr_decay_iters": _DECAY,
        "lr_wsd_decay_iters": _DECAY, "clip_grad": _ours("optimizer.max_grad_norm"), "adam_eps": _ours("optimizer.eps"),
        "num_layers": _ours("model.num_hidden_layers"), "ffn_hidden_size": _ours("model.intermediate_size"),
        "num_query_groups": _ours("model.num_key_value_heads"), "group_query_attention": _ours("model.num_key_value_heads"),
        "kv_channels": _ours("model.head_dim"), "rotary_base": _ours("model.rope.theta"),
        "rotary_percent": _ours("model.rope.partial_rotary_factor"), "init_method_std": _ours("model.initializer_range"),
        "norm_epsilon": _ours("model.rms_norm_eps"), "qk_layernorm": _ours("model.use_qk_norm"),
        "untie_embeddings_and_output_weights": _ours("model.tie_word_embeddings"), "hidden_dropout": _ours("model.residual_dropout"),
        "num_experts": _ours(_MOE + "n_routed_experts"), "moe_router_topk": _ours(_MOE + "num_experts_per_tok"),
        "moe_ffn_hidden_size": _ours(_MOE + "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": _ours(_MOE + "n_shared_experts"), "moe_layer_freq": _ours(_MOE + "first_k_dense_replace"),
        "moe_aux_loss_coeff": _ours(_MOE + "balance.aux_loss_weight"), "moe_router_load_balancing_type": _ours(_MOE + "balance.method"),
        "moe_router_bias_update_rate": _ours(_MOE + "balance.bias_update_rate"),
        "moe_router_score_function": _ours(_MOE + "scoring_func"), "moe_expert_capacity_factor": _ours(_MOE + "capacity_factor"),
        "mtp_num_layers": _ours("model.mtp.num_nextn_predict_layers"), "mtp_loss_scaling_factor": _ours("model.mtp.loss_weight"),
        "tensor_model_parallel_size": _ours(_LAYOUT + "tp"), "pipeline_model_parallel_size": _ours(_LAYOUT + "pp"),
        "context_parallel_size": _ours(_LAYOUT + "cp"), "expert_model_parallel_size": _ours(_LAYOUT + "ep"),
        "use_distributed_optimizer": _ours("layout.zero"), "num_layers_per_virtual_pipeline_stage": _ours(
            _LAYOUT + "pipeline_stages_per_rank"),
        "recompute_granularity": _RECOMPUTE, "save_interval": _SAVE, "eval_interval": _VALIDATE, "log_interval": _LOG, "load": _BASE,
        "data_path": _ours("shards.imported", "corpus.sources"), "split": _ours("corpus.validation_fraction"),
        "tokenizer_model": _ours("tokenizer.path"), "async_save": _ours("checkpoints.asynchronous"), "fim_rate": _ours(
            "corpus.sources.NAME.fim.rate"),
        "fim_spm_rate": _ours("corpus.sources.NAME.fim.spm_rate"), "reset_attention_mask": _ours(_PHASE + "mask_documents"),
        "reset_position_ids": _ours(_PHASE + "mask_documents"), "distributed_timeout_minutes": _ours("launch.timeout"),
    },
    "torchtitan": {
        "local_batch_size": _MICRO, "global_batch_size": _GLOBAL, "seq_len": _LENGTH, "steps": _STEPS, "lr": _LR,
        "max_norm": _ours("optimizer.max_grad_norm"), "decay_ratio": _DECAY, "decay_type": _SCHEDULE, "min_lr_factor": _MIN_LR,
        "dump_folder": _RUN_DIR, "flavor": _ours("model.preset"), "data_parallel_shard_degree": _ours(_LAYOUT + "dp_shard"),
        "data_parallel_replicate_degree": _ours(_LAYOUT + "dp_replicate"), "tensor_parallel_degree": _ours(_LAYOUT + "tp"),
        "pipeline_parallel_degree": _ours(_LAYOUT + "pp"), "context_parallel_degree": _ours(_LAYOUT + "cp"),
        "expert_parallel_degree": _ours(_LAYOUT + "ep"), "pipeline_parallel_schedule": _ours(_LAYOUT + "pipeline_schedule"),
        "activation_checkpoint": _RECOMPUTE, "keep_latest_k": _KEEP, "async_mode": _ours("checkpoints.asynchronous"), "log_freq": _LOG,
        "enable_tensorboard": _ours("metrics.tensorboard"), "enable_wandb": _WANDB, "mixed_precision_param": _PRECISION,
        "hf_assets_path": _BASE, "initial_load_path": _BASE, "init_timeout_seconds": _ours("launch.timeout"),
        "train_timeout_seconds": _ours("launch.timeout"), "dataset": _DATASETS, "dataset_path": _DATASETS,
    },
    "nanochat": {
        "depth": _ours("model.num_hidden_layers", "size", note="size derives the whole model from a number of parameters"),
        "max_seq_len": _LENGTH, "device_batch_size": _MICRO, "total_batch_size": _GLOBAL, "num_iterations": _STEPS,
        "target_param_data_ratio": _ours("size", note="size derives the token budget"), "matrix_lr": _ours("optimizer.learning_rate"),
        "embedding_lr": _GROUP_RATE, "unembedding_lr": _GROUP_RATE,
        "scalar_lr": _ours("optimizer.adam_learning_rate"), "warmup_ratio": _WARMUP, "warmdown_ratio": _DECAY, "final_lr_frac": _MIN_LR,
        "eval_every": _VALIDATE, "eval_tokens": _ours("train.validation_bytes_per_domain", note="in bytes, since tokenizers differ"),
        "core_metric_every": _ours("evaluate.every"), "core_metric_max_per_task": _ours("evaluate.every_items"),
        "model_tag": _ours("name"), "examples_per_step": _ours("grpo.prompts_per_step"), "num_samples": _GENERATIONS,
    },
}  # fmt: skip
"""By tool: its keys (Megatron's options with _ for -), each with what stands for it here. A key of several tools may be in several."""
