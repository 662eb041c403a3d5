"""Supervised fine-tuning: the same trainer on conversations, with loss on the assistant's tokens only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from lmworks.checkpoint import checkpoints as saved
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.communicator import new_communicator
from lmworks.checkpoint.listing import content_of
from lmworks.checkpoint.run_bundle import run_files_of
from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError
from lmworks.metrics.log import MetricLog, NoMetrics
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.loading.weights import rope_of
from lmworks.recipe.schema.checkpoints import Checkpoints as Options
from lmworks.recipe.schema.lora import Lora, is_adapter
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.fingerprint import as_tree, fingerprint
from lmworks.shards.read.tuning_batches import TuningBatches
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.adapters import adapter_identity, adapter_meta
from lmworks.train.curriculum import TuningCurriculum
from lmworks.train.data.chat import build_chat_data, chat_shards
from lmworks.train.data.frozen_tokenizer import META, digest, require_same
from lmworks.train.load import final_checkpoint
from lmworks.train.observe.sampling import ChatSampler
from lmworks.train.observe.validation import validate_conversations
from lmworks.train.pretrain import build_model, identity, with_optimizer
from lmworks.train.trainer import StageFiles, Trainer
from lmworks.watch.bad_steps import BadSteps
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger

REPLAY = "replay"  # under this key a checkpoint's meta has the hashes of the token files that `tune.replay` reads


def tune(
    recipe: Recipe, run_dir: Path, flops_per_token: Callable[[int], float], resume_command: str,
    protect: Callable[[], tuple[Collection[str], Decontaminator | None]] = lambda: ((), None),
    ranks: Ranks | None = None, heartbeat: Heartbeat | None = None,
    load_adapter: Callable[[Path, Mapping[str, Tensor], Model, Lora, str], None] | None = None,
) -> None:  # fmt: skip
    """Fine-tune the base model of `run_dir`; the selection biases of the experts stay as pretraining left them.

    Reads `tokenizer/`, `corpus/` (what it holds out is not tuned on) and the newest good checkpoint; writes `tune/`. `protect` is called
    where the conversations are to be made, for what `build_chat_data` keeps out of them. `load_adapter` fills the adapters from the folder
    that `tune.lora.init_from` names. Raises `Interrupted` when asked to stop, and
    `UserError`.
    """
    assert recipe.tune is not None
    folder = run_dir / "tune"
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    ranks = ranks or alone()
    if ranks.is_first and not (folder / "data" / "manifest.json").exists():
        build_chat_data(recipe, tokenizer, folder / "data", run_dir / "corpus", *protect())
    ranks.barrier()
    curriculum = TuningCurriculum(recipe, folder / "data")
    lora = recipe.tune.lora
    model = build_model(recipe, ranks, lora)
    base = _load_base(recipe, run_dir, model)
    if lora is not None and lora.init_from is not None:
        assert load_adapter is not None
        load_adapter(Path(lora.init_from), model.state_dict(), recipe.model, lora, content_of(base))
    model, optimizer = with_optimizer(recipe, model)
    held_out = _held_out(recipe, folder / "data")
    replayed = {REPLAY: curriculum.replay.digests} if curriculum.replay else {}
    with (
        Ledger(run_dir / LEDGER) if ranks.is_first else NoLedger() as ledger,
        Checkpoints(
            folder / "checkpoints", _checkpoint_options(recipe), identity(recipe) | adapter_identity(lora, base),
            report=ledger.write,
            recipe=as_tree(recipe), total_tokens=curriculum.tokens, run_files=lambda: run_files_of(run_dir, folder / "checkpoints"),
        ) as checkpoints,
    ):
        stability = recipe.stability
        keep = stability.save_bad_batches if ranks.is_first else 0
        bad_steps = BadSteps(folder / "bad_batches", stability.max_bad_steps, keep, ledger.write)
        sampler = ChatSampler(folder / "samples.jsonl" if ranks.is_first else None, tokenizer, recipe.evaluate.questions)
        trainer = Trainer(
            recipe, model, optimizer, curriculum, StageFiles(checkpoints, ledger, bad_steps, sampler),
            validate=lambda: validate_conversations(model, held_out) if held_out is not None else {},
            flops_per_token=flops_per_token, resume_command=resume_command,
            heartbeat=heartbeat or Heartbeat(None), early_stopping=recipe.tune.early_stopping,
            use_best=recipe.tune.keep == "best",
            stage="tune",
            meta={"recipe": fingerprint(recipe), "base": base.name, META: digest(run_dir)} | replayed | adapter_meta(lora, base, run_dir),
        )  # fmt: skip
        first = trainer.resume()
        if first and trainer.resumed_meta.get(REPLAY, {}) != replayed.get(REPLAY, {}):
            raise UserError(
                f"the token files in {run_dir / 'shards'} are not those that tuning has replayed so far; put the old text back, or delete "
                f"{folder} to tune again"
            )
        beats = heartbeat.directory if heartbeat else None
        with MetricLog(folder, recipe.metrics, first + 1, beats) if ranks.is_first else NoMetrics() as metrics:
            trainer.run(metrics)


def _checkpoint_options(recipe: Recipe) -> Options:
    """Those of the run; a best checkpoint that the stage ends with is kept."""
    assert recipe.tune is not None
    options = recipe.checkpoints.of("tune/checkpoints")
    return options.model_copy(update={"keep_best": True}) if recipe.tune.keep == "best" else options


def _load_base(recipe: Recipe, run_dir: Path, model: ParallelModel) -> Path:
    """The weights that tuning begins with, on all ranks, which are those that leave; the first looks for the newest good ones."""
    communicator = new_communicator()
    found: list[Path] = []
    communicator.run_on_all(lambda: found.append(final_checkpoint(run_dir, "base")) if communicator.is_first else None)
    base = communicator.broadcast(found[0] if found else Path())
    meta = saved.load(base, {"model": model.base_state_dict()}, identity(recipe), verified=True, communicator=communicator)
    require_same(run_dir, meta.get(META))
    model.set_rope(rope_of(recipe, meta))
    if recipe.optimizer.ema_decay:
        average = {name: parameter.detach() for name, parameter in model.named_parameters() if not is_adapter(name)}
        saved.load(base, {"average": average}, identity(recipe), verified=True, communicator=communicator)
    return base


def _held_out(recipe: Recipe, data: Path) -> TuningBatches | None:
    """Four batches of held-out conversations; None if none were held out."""
    assert recipe.tune is not None
    prefixes, weights = chat_shards(data, "validation")
    length, batch = int(recipe.tune.sequence_length), int(recipe.tune.global_batch_size)
    return TuningBatches(prefixes, length, batch, 4 * batch, recipe.seed, weights) if prefixes else None
