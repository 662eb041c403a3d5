"""Mistakes in the flags of engines and in monitoring."""

MUTANTS = [
    ("deploy.monitoring:_panel", "{metric}_bucket", "{metric}_buckets",
     "Panels ask for metrics that the pinned vLLM writes.", "deploy/test_recorded.py deploy/test_monitoring.py"),
    ("deploy.monitoring:alert_rules", "WAITING=metrics.waiting", 'WAITING="sum(vllm:num_requests_queued)"',
     "Alerts ask for metrics that the pinned engine writes.", "deploy/test_recorded.py deploy/test_monitoring.py"),
    ("deploy.files:compose_yaml", 'model.replace("$", "$$")', "model", "A path with a dollar sign is the path in compose.yaml.",
     "cli/test_deploy_command.py"),
    ("deploy.engines:launch_sglang", '"--max-running-requests"', '"--max-running-request"',
     "Flags of SGLang are those of the pinned version.", "deploy/test_recorded.py"),
    ("deploy.engines:launch_vllm", '"--max-num-seqs"', '"--max-num-sequences"', "Flags of vLLM are those of the pinned version.",
     "deploy/test_recorded.py"),
    ("deploy.engines:launch_sglang", "fit.sequences * fit.data", "fit.sequences", "SGLang's limit of requests is over all replicas.",
     "deploy/test_sizing.py"),
    ("deploy.engines:_api", '"--host", request.host', '"--host", "0.0.0.0"', "A server is not reachable from outside unless asked.",
     "cli/test_deploy_command.py"),
    ("deploy.deploy:_copy_package", "    if on_cpu:\n", "    if False:\n", "A container for a CPU gets torch without CUDA.",
     "deploy/test_containers.py"),
    ("deploy.deploy:plan_deployment", "    if others:\n", "    if False:\n",
     "An engine that would read weights beside the model's is not deployed.", "weights/test_weight_files.py"),
    ("deploy.monitoring:_panel_of", 'legend += " {{metric}}"', "pass",
     "Two series of one name have legends that differ.", "deploy/test_monitoring.py::test_series_of_one_name_have_legends_that_differ"),
]  # fmt: skip
