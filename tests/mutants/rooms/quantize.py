"""Mistakes in the measurement and the certificate of quantized models."""

MUTANTS = [
    ("quantize.evidence:gguf_evidence", "notes=gguf.notes_of(job.source)", "notes=[]",
     "A certificate tells what the file says otherwise than the model.", "quantize/test_quantize_command.py"),
    ("quantize.agreement:_compare", "(p.exp() * (p - q)).sum(-1)", "(q.exp() * (q - p)).sum(-1)",
     "The divergence is that of the quantized from the original distribution.", "quantize"),
    ("quantize.agreement:_compare", "ids[begin + 1 : begin + _ROWS + 1]", "ids[begin : begin + _ROWS]", "Perplexity is of the next token.",
     "quantize/test_agreement.py"),
    ("quantize.agreement:_compare", "nan=math.inf", "nan=0.0", "Logits that are not finite fail the certificate.",
     "quantize/test_agreement.py"),
    ("quantize.certificate:_failures", "if not found.kl_mean <= limits.kl:", "if found.kl_mean > limits.kl * 1e9:",
     "A model far from the original fails its certificate.",
     "quantize/test_quantize_command.py::test_the_limits_decide"),
    ("quantize.certificate:require_passed", '[] if found["verdict"] == "passed" else', "[] if True else",
     "A model that failed its certificate is not served.", "quantize/test_quantize_command.py::test_a_deployment_serves_what_is_certified"),
    ("quantize.certificate:require_passed", "if not known or (model.is_file() and model.name not in known):", "if False:",
     "A certificate names the file that it is of.", "quantize/test_quantize_command.py::test_a_deployment_serves_what_is_certified"),
    ("quantize.programs:_SENSITIVE", r"(linear_attn|mamba)", "(mamba)",
     "Layers whose errors add up in a state are not quantized.", "quantize/test_compressed.py"),
]  # fmt: skip
