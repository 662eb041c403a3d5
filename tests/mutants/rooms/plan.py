"""Mistakes in the plan of memory, operations and parameters."""

MUTANTS = [
    ("plan.memory:_fsdp_state", "group.muon * 4 + group.adam * 8", "group.muon * 8 + group.adam * 8",
     "Muon keeps one moment per matrix element.", "plan/test_plan.py"),
    ("plan.memory:_fsdp_state", "(degree if layout.zero >= level else 1 for level in (1, 2, 3))",
     "(degree if layout.zero > level else 1 for level in (1, 2, 3))", "ZeRO shards what its level says.", "plan/test_plan.py"),
    ("plan.memory:kv_cache_bytes", "min(length, model.sliding_window)", "length", "A sliding window bounds the KV cache.",
     "plan deploy/test_sizing.py"),
    ("plan.memory:_stage_memory", "activations = tokens * (in_flight * stored + working)", "activations = tokens * (stored + working)",
     "A pipeline rank keeps the activations of several micro-batches.", "plan/test_plan.py plan/test_pipelines.py"),
    ("plan.memory:_local", "if layout.pp > 1 and (model.tie_word_embeddings or model.mtp):", "if False:",
     "The last pipeline stage has a copy of a tied embedding.", "plan/test_plan.py plan/test_pipelines.py"),
    ("plan.counts:Counts.active_computed", "self.active if self.tied else self.active - self.embedding", "self.active",
     "The embedding look-up is not counted as computation.", "plan/test_counts.py plan/test_plan.py"),
    ("plan.counts:adapter_size", "prod(stack) * lora.rank * (rows + columns)", "lora.rank * (rows + columns)",
     "Each expert has an adapter of its own.", "plan/test_counts.py"),
    ("plan.flops:flops_per_token", "4.0 if frozen else 6.0", "6.0", "Frozen weights cost 4 operations per parameter and token.", "plan"),
    ("plan.flops:keys_seen", "(length + 1) / 2", "length", "A causal query sees half of the keys.", "plan/test_plan.py"),
    ("plan.flops:mfu", "/ (devices * tflops * 1e12)", "/ (tflops * 1e12)", "MFU is of all devices.", "plan"),
    ("plan.layout:problems", "if ranks % layout.ep:", "if False:", "Expert ranks divide the data ranks.", "plan/test_plan.py"),
    ("plan.layout:problems", "if sequences % replicas and not uneven:", "if False:", "The sequences of a step divide over the data ranks.",
     "plan/test_plan.py"),
]  # fmt: skip
