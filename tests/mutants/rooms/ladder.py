"""Mistakes in the fits of scaling laws."""

MUTANTS = [
    ("ladder.fit:_minimize", "-(slope * log_size) @ of_size", "(slope * log_size) @ of_size",
     "The gradient of the fit is that of its objective.", "ladder/test_fit.py"),
    ("ladder.fit:_require_enough", "if len(sizes) < 3 or len(horizons) < 3:", "if False:", "A law needs three sizes and three budgets.",
     "ladder/test_fit.py cli/test_ladder_commands.py"),
    ("ladder.fit:_Noise._deviations", "max(0.0, between - own) / self.size", "max(0.0, between) / self.size",
     "Common noise is what exceeds the noise of single runs.", "ladder/test_fit.py"),
    ("ladder.fit:fit_law", "own * random.standard_normal(len(points)) + common", "0 * random.standard_normal(len(points)) + common",
     "Bootstrap fits have the noise of each run.", "ladder/test_fit.py"),
    ("ladder.downstream:fit_downstream", "split_benchmarks(points)[0]", "sorted(points[0].scores)",
     "Only benchmarks that all runs have scored are fitted.", "ladder/test_downstream.py"),
    ("ladder.downstream:_permutation_test", "(shuffled <= score @ x + 1e-12).sum()", "(shuffled >= score @ x + 1e-12).sum()",
     "A benchmark has a signal if it rises as the loss falls.", "ladder/test_downstream.py"),
    ("ladder.annealing:Areas.of", "lr_factors[after_warmup:-1] - lr_factors[after_warmup + 1 :]",
     "lr_factors[after_warmup + 1 :] - lr_factors[after_warmup:-1]", "Annealing is a fall of the learning rate.", "ladder/test_curve.py"),
    ("ladder.run:fit_runs", 'if (folder / "resolved.json").is_file():', "if False:", "No law is written into a run.",
     "cli/test_ladder_commands.py::test_a_forgotten_directory_is_not_that_of_the_first_run"),
    ("ladder.run:LadderFile._named", "if isinstance(sizes, list):", "if False:", "Sizes without names have a remedy.",
     "cli/test_ladder_commands.py::test_a_ladder_file_lists_a_trunk_and_branches_for_each_size"),
]  # fmt: skip
