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
    "ablate": COMMAND, "api": COMMAND, "cli": COMMAND, "deploy": COMMAND, "pages": COMMAND, "preflight": COMMAND, "handover": COMMAND,
    "init": COMMAND, "ladder": COMMAND, "doctor": COMMAND, "bundle": COMMAND, "profile": COMMAND,
    "launch": COMMAND, "quantize": COMMAND, "serve": COMMAND, "corpus.analysis": COMMAND, "evaluate.harness": COMMAND,
    "evaluate.comparison": COMMAND, "evaluate.compared_models": COMMAND, "evaluate.results": COMMAND,
    "shards.import_tokens": COMMAND, "io.destinations": COMMAND, "recipe": RECIPE, "checkpoint": DAMAGE, "watch": DAMAGE,
}  # fmt: skip
"""Rooms and folders of which every place is of one kind."""

PLACES = (
    (FIRST, "the sources, steps and executor of the corpus", """
        corpus.pipeline refusals
        corpus.pipeline check_sources(2)
        corpus.transform.rule_table rules_for
        corpus.read.__init__ parts
        corpus.read.listing find_files
        corpus.engine.reading_pass _check_facts(2)
        corpus.transform.steps _function(3) _python
        corpus.transform.rewrite _Rewriter.__init__
        corpus.transform.quality Classifier.load(4)
        corpus.dedup.semantic _model_embedding(3)
    """),
    (FIRST, "packages and rights of this machine; each is asked by the step, reader or stage that needs it", """
        corpus.read.conversations generators_of create(3)
        corpus.transform.filter_steps identifier
        corpus.transform.steps _code
        corpus.transform.rewrite rewrite_step
        corpus.read.markup require
        corpus.read.warc parts
        corpus.read.repository parts
        metrics.log _taken
        metrics.trackers import_package
        parallel.zero_offload require_library(2)
        run.refusals _export_packages
        train.rewards make_judge
        verify.answers check_installed
    """),
    (FIRST, "budgets, phases and the text that there is", """
        run.refusals _enough_text _mixtures
        shards.order Order._check(2) Order._mixture(2) Order._plan
        shards.mixture Mixture.__init__ _largest_remainder
        recipe.timeline Timeline.__init__(2)
        shards.build check_imported(2)
        recipe.timeline _Curve.__init__ _Curve._tokens
        recipe.checks phase_refusals.end_of_warm_up
        tokenizer.train check
    """),
    (FIRST, "the tokenizer that a recipe names", """
        tokenizer.tokenizer_json check_same_ids(2) read_bpe.refuse
        tokenizer.chat Template.__init__ Template.render
        tokenizer.foreign ForeignTokenizer.__init__(3) ForeignTokenizer._template
        tokenizer.opening _source _template kept_json(2) require_fit require_chat
        tokenizer.train _adopt _check_round_trip
        tokenizer.turns Turns.__init__ Turns._require_answers
    """),
    (FIRST, "the weights to start from, by their headers", """
        weights.gguf gguf_of gguf_package
        weights.gguf _dequantize GgufWeights._found GgufWeights._info GgufWeights._check_rope
        weights.quantized _pair _unknown _forms dequantized
        weights.int32 layout _stated
        weights.reference find(2)
        weights.reference _place(2)
        weights.huggingface files_of(3) _open _refuse_duplicates refuse_unequal_copies(2)
        weights.names huggingface_name refuse_foreign
        weights.huggingface map_weights(2)
    """),
    (FIRST, "the data, rewards and adapters of the stages after pretraining", """
        export.peft read_peft(4) _require_targets(2) _read_config _require_options(4) _Joined.part
        model.lora _refuse_targets(2)
        run.refusals _adapters.look
        plan.stages later_phases
        shards.validation check_batch
        train.prompts refusals(3) read_prompts
        train.rewards AnswerCheck.finish
        train.rewards check_file(3)
        train.stage require_held_out
        train.data.chat _write
        train.data.row_files read_files(2) read_dataset _list_files(3)
        train.data.sets task_share
        train.data.decontamination Decontamination._decide
        train.data.preferences build_preferences
        train.data.mixture replayed_rows
        train.data.sets require_sets
        train.validation EarlyStopper.observe
        train.observe.sampling refusals
    """),
    (FIRST, "the evaluation sets", """
        evaluate.generation.interface Declared.open(2)
        evaluate.generation.humaneval HumanEval.__init__
        evaluate.protection _questions(4)
        evaluate.sets.benchmarks _own_items
        evaluate.sets.own_tasks _read_rows(3) _meaning(3)
        evaluate.sets.benchmarks check_names(3)
        evaluate.sets.sources files(2) local_rows require_ids
    """),
    (FIRST, "the formats of the export", """
        export.export check
        export.gguf_tokenizer find_rule
    """),
    (FIRST, "layout, memory and disk", """
        plan.layout choose(5)
        run.prediction require_disk
        run.refusals _layout _memory
    """),
    (BEGINNING, "the run directory, earlier runs in it, and the time that there is", """
        io.urls refuse_conflicting.look _reveal load
        io.files cache_directory
        run.run_dir require_run require_own_run_dir require_own_folder(2) _entries
        run.stages stages_for
        recipe.timeline PhaseSteps.of
        run.time_budget require_kept settle_budget _naming_time
        run.changed_order keep_order require_same_past(5) _require_same_steps(3)
    """),
    (BEGINNING, "the ranks that were started do not fit the layout, or each other", """
        parallel.process_group check_consistency
        parallel.mesh Ranks.__init__(3)
        recipe.schema.layout layout_for
    """),
    (LATER, "a layout whose sizes `run.refusals` has checked; this is the same rule where tensors are split", """
        parallel.context split
        parallel.parallelize build(2)
        parallel.parallel_model ParallelModel.configure
        parallel.tensor Stream.begin
    """),
    (LATER, "what the documents of the sources hold, once they have been read and filtered", """
        corpus.transform.checks parse_code(2)
        corpus.engine.assembling require_documents(2) omit_empty_sources(2)
        corpus.engine.step_runner make_variants _outcomes _raise_for_document
        corpus.pipeline _require_clean
        corpus.read.rows Columns.columns_to_read
        corpus.transform.steps _python.checked(2)
        evaluate.bits_per_byte _files held_out
        shards.build _jobs(2) _imported
        shards.decontaminate decontaminate(2)
        shards.encode encode_part open_parquet
        shards.encode _special
        shards.validation Validation.__init__
        tokenizer.evaluate source_weights(3)
        tokenizer.train _learn
        train.observe.long_context LongContextEvaluator._needles_of
    """),
    (LATER, "what is downloaded by the stage: wheels, datasets, services", """
        corpus.pipeline _find_parts(2)
        corpus.read.huggingface open_dataset(2)
        corpus.read.listing _list_remote
        corpus.read.standard_library parts
        corpus.read.wheel parts
        corpus.transform.rewrite _Rewriter._ask
        evaluate.sets.benchmarks _read(2) load(3)
        evaluate.sets.sources rows(2) hub_rows(2)
        evaluate.sets.sources wheel_path
        io.wheels named wheel member _download(3)
        evaluate.generation.interface read_rows(2)
        evaluate.generation.gsm8k _problems
        evaluate.generation.humaneval _problems HumanEval.prompts judge
        evaluate.generation.ruler_texts _parsed(2)
        evaluate.generation.ruler_texts words essays _essays read_json _read(2)
        evaluate.generation.ruler Ruler.prompts Ruler.prompt
        train.data.chat build_chat_data
    """),
    (LATER, "processes and machines that the corpus is made on", """
        corpus.engine.slurm_executor run_tasks
        corpus.engine.local_executor _Pool._handle_answers raise_task_error
        corpus.engine.ray_executor _connect(2) _run_pass
        corpus.engine.slurm_executor execute _submit _wait
        corpus.read.markup Extractor.text
        host.pool map_unordered
    """),
    (LATER, "weights, once they have been loaded or trained", """
        train.trainer Trainer._are_finite Trainer._flush Trainer._require_same_tokens
        export.gguf write_gguf_adapter(2) load_gguf(2) _damaged
        export.export export(2) _require_all
        export.parity _load_in_transformers(2) require_parity
        run.start_weights compare_first_loss
        train.ewc EwcPenalty.estimate
        train.fault_handler FaultHandler.check_corruption
        train.own_loop OwnLoopTrainer.save OwnLoopTrainer._saved_at
        train.observe.forgetting ForgettingMonitor.measure
        train.rollouts RolloutChecks.check
        evaluate.logprobs BatchedLogProbs._run
        inference.sampling choose
        weights.names _our_names to_huggingface
    """),
    (LATER, "memory that is free when it is needed", """
        host.machine require_memory
        shards.block_cache BlockCache.__init__ _allocated
    """),
    (LATER, "single rows of a file, which are left out and counted, and refused only if nothing is left", """
        tokenizer.chat checked unused_markers
        tokenizer.messages _Text._add_part(2) _Text.add _detail _list_of_calls _role _tool _tool_call(2) read_json(2)
        tokenizer.messages _weight(2) normal(3) normal_tools(2)
        tokenizer.turns Turns.encode
        tokenizer.turns Turns._spans(3) Turns._require_end
        train.data.masks fit(2)
        train.data.preferences _add_others(2)
    """),
    (DAMAGE, "files of a run that lmworks wrote", """
        corpus.document split_id
        io.files full_disk explain_os_errors(2) explain_damage read_json(3) read_regular open_regular
        io.jsonl read(2)
        optim.optimizer Optimizer.load_state_dict
        shards.lineage open_lineage
        shards.manifest Manifest.load(2) Manifest.source check_vocabulary(2) _require_hash(2)
        shards.token_stream TokenStream.file
        recipe.timeline Timeline.phase_of
        shards.indexed damaged
        shards.batches Prefetch._get
        shards.batches Batches._check_vocabulary
        shards.validation TuningBatches.__init__(2) TuningBatches.batch
        shards.validation load_token_bytes
        shards.remote _read_with_retries
        io.urls fsspec filesystem explain_storage_errors(4)
        tokenizer.opening load
        tokenizer.text_tokenizer TextTokenizer.__init__(2) TextTokenizer.token_bytes
        tokenizer.tokenizer Tokenizer._template
        tokenizer.train train _keep
        weights.adapters adapters_of(3)
        weights.verified recorded verify_files(3) _changed
        weights.frozen_tokenizer digest require_same_file
        train.ewc EwcPenalty.load
        weights.run_models _final load_checkpoint(2) _empty
        train.pretrain _require_same_data
        train.saving refuse_if_all_damaged
        train.stage _keep_start
        train.tune tune.prepare
    """),
    (DAMAGE, "files of somebody else that are cut, altered or of another form than they say", """
        corpus.read.formats document_format
        corpus.read.files _convert
        corpus.read.opening decompress
        corpus.read.part quarantine_errors
        weights.quantized _Dequantized.get_slice(3) _Dequantized._tensor _Dequantized._packed _Dequantized._blocks
        weights.int32 Int32.get_slice(4)
        weights.mxfp4 Mxfp4.get_slice(3) dequantize
        weights.huggingface load_weights _read_slice(2) _refuse_wrong_size _say_or_refuse
    """),
    (LATER, "memory that runs out, which is known when it does; what a step needs is estimated before the first stage", """
        run.out_of_memory explain_out_of_memory
    """),
    (RECIPE, "values that loading derives, and the machine as LMWORKS_MACHINE says it is", """
        host.machine overrides(2)
        optim.groups group_parameters
    """),
    (COMMAND, "options and arguments of commands, and requests to a server", """
        corpus.engine.job pass_named
        corpus.transform.quality_training labeled(2) _is_good(2) _source
        corpus.transform.quality require_module
        corpus.transform.quality_training train _deduplicate
        evaluate.follow scores_in_loop _resolved _append
        weights.chat require_template
        weights.open open_model _split(2) _open_run(3)
        evaluate.speed measure_speed(2)
        inference.batching ContinuousBatch.add(4)
        inference.generate stream
        host.devices parse_gpus(2)
        io.run_layout of_model of_stage
        plan.automatic choose_layout(3)
        run.start require_stage
        plan.budget seconds_for_money(2) fit_time _Fitter.best_size
        plan.laws load_law(3)
        run.checkpoint_commands find(2) require_own_weights rollback(2) prune average
        io.store Store.document
        run.copy restore_run(2) _restore_checkpoint(2)
        run.fill_cache CacheFiller.__init__
        run.prediction measured_mfu(4)
        run.replay replay(2) require_next_token_loss load_bad
        shards.lineage document_at
        tokenizer.convert convert(2)
        tokenizer.evaluate _ImportedTokenizer.__init__
        tokenizer.from_sentencepiece _added _edges _require_expressible spec_of
        tokenizer.from_tekken spec_of
        tokenizer.train evaluate_sizes _mean
        train.data.chat conversations(2)
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
