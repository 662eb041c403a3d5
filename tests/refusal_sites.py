"""Every place in the source that raises a `UserError`, and why it may.

A run that trains for hours must not end with a refusal that could have come first. So each place is one of:

FIRST     a check of `lmworks.run.refusals` comes to it before the first stage; `test_refusals.py` has a recipe for each
COMMAND   it answers what the user asked of a command, which does nothing before
RECIPE    it is raised while the recipe is loaded, which `plan` and `run` begin with
BEGINNING the run raises it before its first stage, from the run directory and the ranks that were started
LATER     it depends on what exists only when a stage has made or read it; the reason says on what
DAMAGE    a file that lmworks or somebody else wrote is damaged, altered or gone at the moment when it is read

A new place fails the test until it is in this table. Ask first whether it can be FIRST: then add a check, not only a line.
Places are written as `module function function(2)`, with the number of raises where there are several.
"""

from __future__ import annotations

import re
from collections import Counter

FIRST, COMMAND, RECIPE, BEGINNING, LATER, DAMAGE = "FIRST", "COMMAND", "RECIPE", "BEGINNING", "LATER", "DAMAGE"

FOLDERS = {
    "ablate": COMMAND, "cli": COMMAND, "deploy": COMMAND, "doctor": COMMAND, "handover": COMMAND, "ladder": COMMAND, "launch": COMMAND,
    "quantize": COMMAND, "serve": COMMAND, "corpus.analysis": COMMAND, "evaluate.harness": COMMAND, "evaluate.compare": COMMAND,
    "shards.importing": COMMAND, "recipe": RECIPE, "checkpoint": DAMAGE, "watch": DAMAGE,
}  # fmt: skip
"""Rooms and folders of which every place is of one kind."""

PLACES = (
    (FIRST, "the sources, steps and executor of the corpus", """
        corpus.source_checks refusals
        corpus.pipeline check_sources(2)
        corpus.rules.table rules_for
        corpus.readers.__init__ parts
        corpus.readers.listing find_files
        corpus.engine.passes.reading _check_facts(2)
        corpus.steps.python _function(3) Python.make
        corpus.steps.rewrite _Rewriter.__init__
        corpus.quality.classifier Classifier.load(4)
        corpus.dedup.semantic _model_embedding(3)
    """),
    (FIRST, "packages and rights of this machine; each is asked by the step, reader or stage that needs it", """
        corpus.generated_questions generators_of create(3)
        corpus.steps.language identifier
        corpus.steps.code Code.make
        corpus.steps.rewrite Rewrite.make
        corpus.readers.extraction require
        corpus.readers.warc parts
        corpus.readers.repository parts
        metrics.sinks _import _taken
        parallel.zero_offload require_library(2)
        run.refusals _export_packages
        train.align.rewards make_judge
        verify.symbolic check_installed
    """),
    (FIRST, "budgets, phases and the text that there is", """
        run.refusals _enough_text _mixtures
        shards.order.order Order._check(2) Order._mixture(2) Order._plan
        shards.order.mixture Mixture.__init__ _largest_remainder
        recipe.derivation.timeline Timeline.__init__(2)
        shards.build.build_shards check_imported(2)
        recipe.derivation.schedules _Curve.__init__ _Curve._tokens
        recipe.loading.phase_checks phase_refusals.end_of_warm_up
        tokenizer.train check
    """),
    (FIRST, "the tokenizer that a recipe names", """
        tokenizer.bpe check_same_ids(2) read.refuse
        tokenizer.chat Template.__init__ Template.render
        tokenizer.foreign ForeignTokenizer.__init__(3) ForeignTokenizer._template
        tokenizer.keeping _source kept_json(2) require_fit require_chat
        tokenizer.train _adopt _check_round_trip
        tokenizer.turns Turns.__init__ Turns._check
    """),
    (FIRST, "the weights to start from, by their headers", """
        weights.gguf_names gguf_of gguf_package
        weights.gguf _read GgufWeights._found GgufWeights._info GgufWeights._check_rope
        weights.quantized _pair _block(2)
        weights.reference find(3)
        weights.huggingface files_of(3) _open refuse_unequal_copies(2)
        weights.names huggingface_name refuse_foreign
        weights.weight_map map_weights(2)
    """),
    (FIRST, "the data, rewards and adapters of the stages after pretraining", """
        export.peft read_peft(6) _read_config _require_options(4)
        model.lora attach(2)
        run.refusals _adapters.look
        plan.stage_phases stages_as_phases
        shards.read.tuning_batches check_batch
        train.align.prompts refusals(3) read_prompts
        train.align.right_answers AnswerCheck.finish
        train.align.rewards check_file(3)
        train.check require_held_out
        train.data.chat _write
        train.data.conversation_files read_files read_dataset _list_files(2)
        train.data.conversation_sets task_share
        train.data.decontamination Decontamination._decide
        train.data.preferences build_preferences
        train.data.replay replayed_rows
        train.data.sets require_sets
        train.early_stopping EarlyStopping.observe
    """),
    (FIRST, "the evaluation sets", """
        evaluate.generation.declared Declared.open(2)
        evaluate.generation.humaneval HumanEval.__init__
        evaluate.protection _questions(4)
        evaluate.sets.loading _own_items
        evaluate.sets.own items(3)
        evaluate.sets.registry check_names(2)
        evaluate.sources.local files rows
    """),
    (FIRST, "the formats of the export", """
        export.export check
        export.gguf_tokenizer find_rule
    """),
    (FIRST, "layout, memory and disk", """
        plan.layout choose(5)
        run.disk_space require_disk
        run.refusals _layout _memory
    """),
    (BEGINNING, "the run directory, earlier runs in it, and the time that there is", """
        credentials refuse_conflicting.look _reveal load
        run.run_dir require_run require_own_run_dir require_own_folder(2) _entries
        run.stages stages_for
        recipe.derivation.timeline PhaseSteps.of
        run.time_budget require_kept settle_budget
    """),
    (BEGINNING, "the ranks that were started do not fit the layout, or each other", """
        parallel.consistency check_consistency
        parallel.mesh Ranks.__init__(3)
        parallel.process_group layout_for
    """),
    (LATER, "a layout whose sizes `run.refusals` has checked; this is the same rule where tensors are split", """
        parallel.context shard_context(2) split
        parallel.experts shard_experts
        parallel.parallelize build(2)
        parallel.tensor Stream.begin shard_tensors
    """),
    (LATER, "what the documents of the sources hold, once they have been read and filtered", """
        corpus.checks.parsing parse_code(2)
        corpus.engine.assembling require_documents(2) omit_empty_sources(2)
        corpus.engine.step_runner make_variants _outcomes _raise_for_document
        corpus.pipeline _require_clean
        corpus.readers.rows Columns.columns_to_read
        corpus.steps.python Python.make.checked(2)
        evaluate.heldout _files held_out
        shards.build.build_shards _jobs(2) _imported
        shards.build.decontaminate decontaminate(2)
        shards.build.encode encode_part open_parquet
        shards.build.fim _special
        shards.read.validation Validation.__init__
        tokenizer.sample source_weights(3)
        tokenizer.train _learn
        train.observe.long_context LongContextEvaluator._needles_of
    """),
    (LATER, "what is downloaded by the stage: wheels, datasets, services", """
        corpus.pipeline _find_parts(2)
        corpus.readers.huggingface open_dataset(2)
        corpus.readers.listing _list_remote
        corpus.readers.standard_library parts
        corpus.readers.wheel parts
        corpus.steps.rewrite _Rewriter._ask
        evaluate.sets.loading _read(2) load(2)
        evaluate.sources.data rows(2)
        evaluate.sources.hub rows(2)
        evaluate.sources.package wheel_path
        wheels named wheel member _download(3)
        evaluate.generation.declared read_rows(2)
        evaluate.generation.gsm8k _problems
        evaluate.generation.humaneval _problems HumanEval.prompts judge
        evaluate.generation.ruler.documents _parsed(2)
        evaluate.generation.ruler.texts words essays _essays read_json _read(2)
        evaluate.generation.ruler_sets Ruler.prompts Ruler.prompt
        train.data.chat build_chat_data
    """),
    (LATER, "processes and machines that the corpus is made on", """
        corpus.engine.executors.batch_task run_tasks
        corpus.engine.executors.local _Pool._handle_answers raise_task_error
        corpus.engine.executors.ray _connect(2) _run_pass
        corpus.engine.executors.slurm execute _submit _wait
        corpus.readers.extraction Extractor.text
        pool map_unordered
    """),
    (LATER, "weights, once they have been loaded or trained", """
        train.trainer Trainer._are_finite Trainer._flush
        export.gguf write_gguf_adapter load_gguf(2) _damaged
        export.export export(2) _require_all
        export.parity _load_in_transformers(2) require_parity
        run.start_check compare_first_loss
        train.ewc EwcPenalty.estimate
        train.faults.handler FaultHandler.check_corruption
        train.observe.forgetting ForgettingMonitor.measure
        train.align.rollout_checks RolloutChecks.check
        weights.names _our_name to_huggingface
    """),
    (LATER, "memory that is free when it is needed", """
        machine require_memory
        shards.storage.block_cache BlockCache.__init__ _allocated
    """),
    (LATER, "single rows of a file, which are left out and counted, and refused only if nothing is left", """
        tokenizer.chat checked unused_markers
        tokenizer.messages _Text._add_part(2) _Text.add _detail _json _list_of_calls _role _tool _tool_call(3)
        tokenizer.messages _weight(2) normal(2) normal_tools
        tokenizer.turns Turns.encode
        tokenizer.turns Turns._spans(2)
        train.data.conversation_masks fit(2)
        train.data.preferences _add_others(2)
    """),
    (DAMAGE, "files of a run that lmworks wrote", """
        corpus.document split_id
        files full_disk explain_os_errors require_empty explain_damage read_json(4) open_regular
        jsonl read(2)
        optim.optimizer Optimizer.load_state_dict
        shards.format.lineage open_lineage
        shards.format.manifest Manifest.load(2) Manifest.source check_vocabulary(2) _require_hash(2)
        shards.format.token_stream TokenStream.file
        recipe.derivation.timeline Timeline.phase_of
        shards.format.checksums damaged
        shards.read.prefetch Prefetch._get
        shards.read.batches Batches._check_vocabulary
        shards.read.tuning_batches TuningBatches.__init__(2) TuningBatches.batch
        shards.read.validation load_token_bytes
        shards.storage.remote _read_with_retries
        storage fsspec filesystem explain_storage_errors(4)
        tokenizer.opening load
        tokenizer.text_tokenizer TextTokenizer.__init__(2) TextTokenizer.token_bytes
        tokenizer.tokenizer Tokenizer._template
        tokenizer.train train _keep
        train.adapters adapters_of(3)
        weights.verified recorded verify_files(3) _changed
        train.data.frozen_tokenizer digest require_same_file
        train.ewc EwcPenalty.load
        train.load _final load_checkpoint(2) _empty
        train.pretrain pretrain(2)
        train.saving refuse_if_all_damaged
        train.tune tune.check_resumed
    """),
    (DAMAGE, "files of somebody else that are cut, altered or of another form than they say", """
        corpus.readers.document_formats document_format
        corpus.readers.files _convert
        corpus.readers.opening decompress
        corpus.readers.read_errors quarantine_errors
        weights.quantized _Dequantized.get_slice _Slice.__getitem__
        weights.huggingface load_weights _read_slice(2) _refuse_wrong_size
    """),
    (RECIPE, "values that loading derives, and the machine as LMWORKS_MACHINE says it is", """
        machine overrides(2)
        optim.groups group_parameters
    """),
    (COMMAND, "options and arguments of commands, and requests to a server", """
        corpus.engine.task pass_named
        corpus.quality.examples labeled(2) _is_good(2) _source
        corpus.quality.library require_module
        corpus.quality.train train _deduplicate
        evaluate.follow scores_in_loop _resolved _append
        evaluate.opening open_model _split(2) _open_run(3)
        evaluate.speed measure_speed(2)
        model.batching ContinuousBatch.add(4)
        model.generate stream
        gpus parse_gpus(2)
        model_stages of_model of_stage
        plan.automatic choose_layout(3)
        plan.budget seconds_for_money fit_time _Fitter.best_size
        plan.loss_law load_law(3)
        run.checkpoint_commands find(2) require_own_weights rollback(2) prune average
        run.copy _Remote.read restore_run(2) _restore_checkpoint(2)
        run.prediction measured_mfu(4)
        run.replay replay(2) _require_whole_weights _load
        shards.read.find_document document_at
        tokenizer.evaluate _ImportedTokenizer.__init__
        tokenizer.sizes evaluate_sizes _mean
        train.data.conversation_view conversations(2)
        train.data.mixture validate_change(3)
    """),
)  # fmt: skip


def listed(*kinds: str) -> Counter[str]:
    """How often each place raises, by `module function`, of all places or of those of some kinds."""
    found = Counter[str]()
    for kind, _, text in PLACES:
        for line in text.split("\n") if kind in kinds or not kinds else ():
            module, *functions = line.split() or [""]
            for one in functions:
                name, count = re.fullmatch(r"([\w.]+?)(?:\((\d+)\))?", one).groups()  # type: ignore[union-attr]
                found[f"{module} {name}"] += int(count or 1)
    return found
