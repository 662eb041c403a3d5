"""Mistakes in what is handed over to slime and Megatron."""

MUTANTS = [
    ("handover.arguments:model_arguments",
     '        found.append(Argument("--qk-layernorm", None, "use_qk_norm: without it Megatron drops these weights"))\n', "        pass\n",
     "The norms of queries and keys are handed over.", "handover/test_arguments.py"),
    ("handover.slime:run_arguments", '"--num-rollout"', '"--num-rollouts"', "Options are those that slime's parser knows.",
     "handover/test_slime_parser.py handover/test_arguments.py"),
    ("handover.arguments:model_arguments",
     "        Argument(\"--hidden-dropout\", \"0\", \"the model has none; Megatron's default is 0.1\"),\n", "",
     "Megatron trains without dropout.", "handover/test_arguments.py"),
    ("handover.slime:run_arguments", "math.ceil(epochs * len(rows.rows) / batch)", "epochs * len(rows.rows) // batch",
     "Every prompt is asked in an epoch.", "handover/test_arguments.py"),
    ("handover.arguments:_experts", "[0]*{dense}+[1]*{layers - dense}", "[1]*{layers - dense}+[0]*{dense}",
     "The first layers are the dense ones.", "handover/test_arguments.py"),
    ("handover.arguments:_refuse", '(model.sliding_window is not None, "a sliding window"),', "",
     "A model that Megatron computes differently is refused.", "handover/test_arguments.py cli/test_handover_command.py"),
]  # fmt: skip
