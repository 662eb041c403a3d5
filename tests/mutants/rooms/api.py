"""Mistakes in the Python API, which commands call too."""

MUTANTS = [
    ("api.runs:Run.batches", "[*read_changes(self.path).all, *more]", "[*more]",
     "Batches of a run are read with the mixture changes of its past.",
     "cli/test_data_commands.py::test_a_change_of_the_mixture_is_shown_and_asked_for"),
    ("api.runs:Run.batch", "rollbacks(self.events(), BASE.stage)", 'rollbacks(self.events(), "tune")',
     "A step that a rollback leaves out is shown as that.",
     "cli/test_data_commands.py::test_a_batch_that_a_rollback_left_out_is_shown_as_that"),
    ("api.planning:predict", "if cluster is None else doubtful", "if cluster is not None else doubtful",
     "A plan for this machine says what this machine lacks.", "cli/test_before_a_run.py"),
    ("api.planning:predict", "measured=rehearsed.stages if rehearsed is not None and cluster is None else None",
     "measured=None", "What was rehearsed is what the plan says.", "cli/test_plan_rehearsal.py"),
    ("api.planning:_mfu", "return *measure(recipe, lambda length: flops_per_token(recipe.model, length).total), False",
     "return *measure(recipe, lambda length: flops_per_token(recipe.model, length).total), True",
     "A speed measured on one machine has no communication in it.",
     "plan/test_plan.py::test_plan_calibrates"),
]
