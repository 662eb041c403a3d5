"""Loads the weights that a run starts from (`start_from`), and compares their first loss with that of `transformers` before training.

A wrong name, a transposed matrix or other rotary positions make a model that still trains, from a worse start. The loss of the weights as
they were loaded into the layout of the run, on the same tokens, shows them.
"""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.model import Transformer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe import hub
from lmworks.recipe.derive import count_entries
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import Weights, find_start_weights
from lmworks.shards.batch import IGNORE, Batch
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.opening import kept_json
from lmworks.train.build import load_weights
from lmworks.ui.terminal import console
from lmworks.weights import reference
from lmworks.weights.chat import RECORD, is_chat
from lmworks.weights.verified import verify_export

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative difference of the losses, by the precision of our activations; theirs are fp32. Two fp32 libraries sum in different
orders, which costs 1e-6; rounding to bf16 costs 1e-3. One wrong matrix changes the loss by more than a tenth."""
TEXT = (
    "Water moves around the Earth without end. The sun warms the sea, and a part of the water rises as vapor into the air. High "
    "above the ground it cools, and small drops form clouds. When the drops grow heavy enough, they fall as rain or snow. Some of "
    "it runs into rivers and back to the sea; some sinks into the soil, where plants take it up with their roots. In 1674, a man "
    "in Paris measured the rain of three years, and found that it was six times as much as the river Seine carried away. Until "
    "then, many people had believed that rain alone could not fill the rivers."
)
"""What the loss is measured on: plain prose, on which a trained model has a loss of 2 to 4."""
_PROBES = ("Hello world", "  two spaces", "\nA line")
"""Beginnings of texts, where tokenizers that put a space before a text differ."""
_RANDOM = 8  # tokens that are drawn at random behind the text, so that rows of the embedding count which the text does not use
_TOKENS = 128  # of both, at most
_MOST_ROWS = 8  # of the batch; each is the same work for the other library, on one CPU
_QK_NORMS = ("query_norm.weight", "key_norm.weight")
_HEADROOM = 1.3  # of memory, relative to the fp32 weights, for loading and for activations


def compare_first_loss(start: Weights, model: ParallelModel, communicator: Communicator, seed: int, added: range) -> dict[str, Any]:
    """The loss of `model` beside that of `transformers` on the same tokens, or why it was not compared; called on all ranks.

    The tokens are `TEXT` as the tokenizer of the weights encodes it, and a few random ones, so that the loss says how well the model
    continues prose. `added`: ids of added tokens, whose rows are made in `transformers`, too, as are those of a larger vocabulary. Raises
    `UserError` on all ranks if the losses differ by more than `TOLERANCES`.
    """
    vocabulary, ranks = model.config.vocab_size, model.ranks.size("dp")
    assert vocabulary
    text = model.ranks.first(lambda: _text_ids(start, vocabulary))
    drawn = np.random.default_rng(seed).integers(0, vocabulary, (min(ranks, _MOST_ROWS), _RANDOM), dtype=np.int32)
    limit = min(_TOKENS, int(start.model.max_position_embeddings or _TOKENS))
    row = np.array(text[: max(limit - _RANDOM, 1)], dtype=np.int32)
    rows = np.stack([np.concatenate([row, one])[:limit] for one in drawn])
    # every rank needs a row; beyond the first few they are repeated, and the other library computes each once
    tokens, length = np.resize(rows, (ranks, rows.shape[1])), rows.shape[1]
    repeats = np.bincount(np.arange(ranks) % len(rows), minlength=len(rows))
    labels = np.concatenate([tokens[:, 1:], np.full((ranks, 1), IGNORE, np.int32)], axis=1)
    batch = Batch(tokens, labels, np.arange(0, ranks * length + 1, length, dtype=np.int32), 0, 0)
    was_training = model.training
    model.eval()
    try:
        ours = model.summed_cross_entropy(batch) / batch.valid_tokens
    finally:
        model.train(was_training)
    theirs = model.ranks.first(lambda: _their_loss(start, rows, repeats, vocabulary, added))
    if isinstance(theirs, str):
        if communicator.is_first:
            console.print(f"first loss {ours:.4f}, not compared with transformers: {theirs}", style="yellow")
        return {"loss": ours, "not_compared": theirs}
    difference, tolerance = abs(ours - theirs) / abs(theirs), TOLERANCES[model.compute_dtype]
    if not difference <= tolerance:
        raise UserError(
            f"the first loss of {start.name} is {ours:.4f} here and {theirs:.4f} in transformers on the same {rows.size} tokens; the "
            "weights are not read as what they are, so nothing was trained; please report this with config.json"
        )
    if communicator.is_first:
        what = f"{min(len(row), length)} tokens of prose and {max(0, length - len(row))} random ones"
        console.print(f"first loss {ours:.4f} on {what}, in transformers {theirs:.4f}: equal to {difference:.0e}", style="dim")
    precision = str(model.compute_dtype).removeprefix("torch.")
    return {"loss": ours, "transformers": theirs, "difference": difference, "tokens": int(rows.size), "precision": precision}


def _text_ids(start: Weights, vocabulary: int) -> list[int]:
    """The first tokens of `TEXT` for a model with this vocabulary."""
    try:
        ids = load_tokenizer(start.tokenizer.parent).encode(TEXT)[:_TOKENS]
    except UserError:  # it is refused where it is taken over; the recipe may replace it
        ids = []
    return [one for one in ids if one < vocabulary]


def _their_loss(start: Weights, rows: np.ndarray, repeats: np.ndarray, vocabulary: int, added: range) -> float | str:
    """The mean loss per token in `transformers`, in fp32 on the CPU, or why it cannot be computed."""
    needed, free = _HEADROOM * 4 * count_parameters(start.model), machine.available_memory()
    if needed > free:
        return f"its fp32 weights need {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free"
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "it is not installed (pip install 'lmworks[export]')"
    from lmworks.export.huggingface import quiet_transformers

    with quiet_transformers():
        differs = _other_ids(start)
    if differs is not None:
        console.print(differs, style="yellow")
    with quiet_transformers(), redirect_stderr(io.StringIO()), torch.no_grad():  # a progress bar of the GGUF reader
        try:
            theirs = _their_model(start).eval()
            _add_rows(theirs, vocabulary, added)
            tokens_BT = torch.from_numpy(rows).long()
            losses = [torch.nn.functional.cross_entropy(theirs(row[None]).logits[0, :-1], row[1:]) for row in tokens_BT]
        except Exception as error:  # it raises what its dependencies raise, and the loss is only compared
            return " ".join(f"it cannot compute with the weights ({type(error).__name__}: {error})".split())[:300]
    loss = float((torch.stack(losses).double() * torch.from_numpy(repeats)).sum() / repeats.sum())
    return loss if math.isfinite(loss) else f"its loss is {loss}"


def _other_ids(start: Weights) -> str | None:
    """A line about a text of which the class of `transformers` has other ids than its tokenizer.json; None if there is none."""
    import transformers

    try:
        ours = load_tokenizer(start.tokenizer.parent)
        theirs = transformers.AutoTokenizer.from_pretrained(start.tokenizer.parent)
        found = ((text, ours.encode_batch([text])[0].tolist(), theirs(text, add_special_tokens=False).input_ids) for text in _PROBES)
        text, own, other = next(one for one in found if one[1] != one[2])
    except Exception:  # none differs, or one of the two cannot be opened, which is refused where it is needed
        return None
    return (
        f"{type(theirs).__name__} of transformers {transformers.__version__} encodes {text!r} as {other}, and {start.tokenizer}, which is "
        f"used as it is, as {own}; if the weights were trained with the former, write the file again with its save_pretrained"
    )


def _their_model(start: Weights) -> Any:
    """The model of `transformers`, in fp32 whatever its weights are stored in."""
    import transformers

    if start.origin is not None and (found := sorted(start.path.glob("*.gguf"))):
        return transformers.AutoModelForCausalLM.from_pretrained(Path(start.path), dtype=torch.float32, gguf_file=found[0].name)
    config = transformers.AutoConfig.from_pretrained(start.path)
    if isinstance(stored := getattr(config, "quantization_config", None), dict):
        stored["dequantize"] = True  # by methods that cannot, it is ignored
    return transformers.AutoModelForCausalLM.from_pretrained(Path(start.path), config=config, dtype=torch.float32).float()


def _add_rows(theirs: Any, vocabulary: int, added: range) -> None:
    """Give the rows of new tokens the mean of the others, as `lmworks.export.huggingface.load_weights` does."""
    before = theirs.get_input_embeddings().weight.shape[0]
    rows = [*added, *range(before, vocabulary)]
    if not rows:
        return
    if vocabulary > before:
        theirs.resize_token_embeddings(vocabulary, mean_resizing=False)
    for table in (theirs.get_input_embeddings(), theirs.get_output_embeddings()):
        table.weight[rows] = table.weight[: min([before, *added[:1]])].double().mean(0).float()


def check_start(recipe: Recipe) -> None:
    """Raise `UserError` if the weights of `start_from` cannot be those of the model, by their headers and by tensors that must be equal, or
    if tokens cannot be added."""
    from lmworks.weights.huggingface import map_weights, refuse_unequal_copies
    from lmworks.weights.verified import verify_export

    assert recipe.start_from is not None
    start = find_start_weights(recipe.start_from)
    if start.kind == "huggingface":
        verify_export(start.path)
        map_weights(start.path, recipe.model)
        refuse_unequal_copies(start.path, recipe.model)
    if recipe.tokenizer.add_tokens:
        kept_json(recipe)


def load_start_weights(recipe: Recipe, model: ParallelModel, communicator: Communicator) -> dict[str, Any]:
    """Load the weights into the model; each rank reads its own parts. Returns their origin, for the ledger and all checkpoints, with the
    first loss of weights in Hugging Face's format beside that of `transformers`.

    Raises `UserError` on all ranks if the weights are damaged or do not fit the model, or if the losses differ.
    """
    assert recipe.start_from is not None
    ranks = model.ranks
    # on every rank: hosts may have caches of their own for models of the hub
    start = communicator.broadcast(communicator.run_on_all(partial(find_start_weights, recipe.start_from)))
    added = _added_tokens(recipe, start)
    if start.kind == "huggingface":
        ranks.first(lambda: verify_export(start.path))
        communicator.run_on_all(lambda: reference.read(start, model.state_dict(), recipe.model, added))
    else:
        new = _QK_NORMS if recipe.model.use_qk_norm and not start.model.use_qk_norm else ()  # which the first phase adds (qk_norm_steps)
        # those that an export of that run would have
        load_weights(start.path, model, None, communicator, start.averaged, verified=False, without=new)
    about = ranks.first(lambda: reference.describe(start) | {RECORD: is_chat(start)})
    if added:
        about["added"] = [added.start, added.stop]
    if (model_of_hub := hub.parse(recipe.start_from)) is not None:
        about["hub"] = {"name": model_of_hub.name, "revision": model_of_hub.revision, "commit": model_of_hub.commit}
    if communicator.is_first:
        console.print(f"initialized from the weights of {model_of_hub or start.name}", style="dim")
    if start.kind == "huggingface":  # under train.deepspeed, too: the model is whole on the CPU until DeepSpeed takes it over
        about["first_loss"] = compare_first_loss(start, model, communicator, recipe.seed, added)
    return about


def load_start_model(recipe: Recipe) -> Transformer:
    """The whole model that a run started from, in evaluation mode, on the first GPU, else the CPU.

    Raises `UserError` if the weights are not there any more, or damaged.
    """
    from lmworks.weights.run_models import load_checkpoint

    assert recipe.start_from is not None
    start = find_start_weights(recipe.start_from)
    if start.kind == "checkpoint":
        return load_checkpoint(start)
    verify_export(start.path)
    model = Transformer(recipe.model)
    reference.read(start, model.state_dict(), recipe.model, _added_tokens(recipe, start))
    return model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _added_tokens(recipe: Recipe, start: Weights) -> range:
    """The ids of `tokenizer.add_tokens`: those behind the last one of the tokenizer of the weights."""
    texts = recipe.tokenizer.add_tokens
    first = count_entries(start.tokenizer) if texts else 0
    return range(first, first + len(texts))
