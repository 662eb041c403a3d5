"""Mistakes in exports to Hugging Face and GGUF, and in the comparison that decides about them."""

MUTANTS = [
    ("export.gguf:write_gguf_adapter", "lora.scale * lora.rank", "lora.scale", "The alpha of a GGUF adapter is scale times rank.",
     "export/test_gguf.py"),
    ("export.gguf:_items", '    if model.rope.scaling == "llama3":', "    if False:",
     "GGUF has the frequency factors of Llama 3's scaling.", "export/test_gguf.py export/test_gguf_reading.py"),
    ("export.gguf:_split_latents", "key.transpose(1, 2)", "key", "Latent keys are transposed for llama.cpp.", "export/test_gguf.py"),
    ("export.gguf:check_gguf", "if found[name].data.tobytes() != item.bits().tobytes():", "if False:",
     "A GGUF file with other values is refused.", "export/test_gguf.py export/test_verify.py"),
    ("export.gguf:load_gguf", "if item.name not in found:", "if False:", "A GGUF file without a tensor is named.",
     "export/test_gguf.py"),
    ("export.parity:Parity.reason", "        if self.problems:\n            return self.problems[0]\n", "",
     "An export whose tensors differ is refused whatever its logits are.", "export/test_parity.py"),
    ("export.parity:Parity.reason", "self.relative <= self.bound", "self.relative <= 1e3 * self.bound",
     "An export is compared within rounding.", "export/test_parity.py"),
    ("export.gguf:_items", '        if ours == "head.weight" and model.config.tie_word_embeddings:\n            continue',
     "        if False:\n            continue", "A tied head is not written to GGUF.", "export/test_gguf.py"),
    ("export.gguf:gguf_writer", "with suppress(OSError):  # what is left to write has no room either\n            writer.close()", "pass",
     "A GGUF file that could not be written is closed.", "export/test_gguf.py"),
]  # fmt: skip
