"""Exports a small model of the same architecture in every format that the recipe requests, and verifies the exports."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from lmworks.doctor.preflight.check_result import CheckContext, CheckResult
from lmworks.doctor.preflight.small_model import HEADS, small_recipe
from lmworks.export import gguf
from lmworks.export.export import DTYPES, check, why_no_gguf
from lmworks.export.huggingface import write_model
from lmworks.export.parity import compare, require_parity
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.loading.huggingface import class_for
from lmworks.tokenizer import load as load_tokenizer

_HIDDEN, _HEAD = 128, 64
_ROWS, _LENGTH = 2, 32


@torch.no_grad()
def round_trip(context: CheckContext) -> CheckResult:
    """Compare the exports, as loaded by transformers and read by a GGUF reader, with the model."""
    options = context.recipe.export
    if not options.huggingface and not options.gguf:
        return CheckResult("skip", "the recipe exports nothing")
    check(context.recipe)
    absent = [name for name, asked in (("transformers", options.huggingface), ("gguf", options.gguf)) if asked and find_spec(name) is None]
    if absent:
        return CheckResult("skip", f"{', '.join(absent)} cannot be imported", "pip install 'lmworks[export]'")
    dtype, directory = DTYPES[options.dtype], context.run_dir / "tokenizer"
    whole = context.recipe.model
    assert whole.vocab_size and whole.num_attention_heads and whole.head_dim
    rows = whole.vocab_size
    # a class may require heads x head_dim to equal the hidden size, and llama.cpp layers without positions as in the full model
    head = _HIDDEN // HEADS if whole.num_attention_heads * whole.head_dim == whole.hidden_size else _HEAD
    small = small_recipe(context.recipe, rows, _HIDDEN, head)
    model = initialize(
        Transformer(small.model.model_copy(update={"no_rope_layer_interval": whole.no_rope_layer_interval})), small.seed
    ).eval()
    texts = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.huggingface:
            write_model(model, folder, {"eos_token_id": [0], "pad_token_id": 0}, dtype)
            tokens_BT = torch.randint(rows, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(small.seed))
            parity = compare(model, folder, tokens_BT, dtype)
            require_parity(parity, folder)
            off = f"off by {parity.relative:.0e} of the largest in fp64, {parity.fp32:.0e} in fp32"
            texts.append(f"{class_for(model.config)}: logits {off}")
        tokenizer = load_tokenizer(directory) if (directory / "tokenizer.json").exists() else None
        if options.gguf == "auto" and (why := why_no_gguf(whole, tokenizer)) is not None:
            texts.append(f"no GGUF: {why}")
        elif options.gguf and tokenizer is not None:
            path = folder / "model.gguf"
            gguf.write_gguf(model, tokenizer, path, dtype, small.name)
            texts.append(f"GGUF {gguf.architecture_for(model.config)}: {gguf.check_gguf(model, path, dtype)} tensors equal")
        elif options.gguf:
            texts.append("GGUF not tested: it contains the tokenizer, and there is none yet")
    return CheckResult("ok", "; ".join(texts))
