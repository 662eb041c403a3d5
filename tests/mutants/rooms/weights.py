"""Mistakes in reading weights that others have made."""

MUTANTS = [
    ("weights.quantized:_Slice.__getitem__", "columns[0] // self.block[1]", "columns[0] // self.block[0]", "FP8 blocks need not be square.",
     "weights/test_quantized_weights.py"),
    ("weights.quantized:_Slice.__getitem__", "stored.float() * scale.reshape(", "stored.float() / scale.reshape(",
     "FP8 weights are multiplied by their scale.", "weights/test_quantized_weights.py"),
    ("weights.quantized:_Dequantized.keys", " and not self._is_scale(name)", "", "Scales are no weights of a model.",
     "weights/test_quantized_weights.py"),
    ("weights.huggingface:load_weights", 'if name == "head.weight" and model.tie_word_embeddings', "if False",
     "A tied head is the embedding.", "weights/test_load_weights.py export/test_huggingface.py"),
    ("weights.huggingface:_read_slice", "min([shape[0], *added[:1]])", "shape[0] + len(added)",
     "A new token begins as the mean of the old ones.", "weights/test_load_weights.py"),
    ("weights.huggingface:refuse_unequal_copies", "model.tie_word_embeddings and head in handles and not _equal(handles, head, embedding)",
     "False", "A head that differs from a tied embedding is refused.", "weights/test_tensors.py weights/test_load_weights.py"),
    ("weights.huggingface:files_of", "if missing := [name for name in named if not (directory / name).is_file()]:", "if missing := []:",
     "A missing file of weights is named.", "weights/test_tensors.py weights/test_load_weights.py cli/test_start_bad_input.py"),
    ("weights.huggingface:read_model", "    verify_export(directory)\n", "", "An export whose files have changed is refused.",
     "weights/test_file_hashes.py export/test_verify.py"),
    ("weights.huggingface:_refuse_wrong_size", "wanted is None or wanted > 2 * stored + _SMALL", "wanted is None",
     "A config that describes more weights than there are is refused before memory is allocated.",
     "weights/test_tensors.py fuzz/test_fuzz.py"),
]  # fmt: skip
