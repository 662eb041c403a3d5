"""Mistakes in contrasts, noise floors and verdicts."""

MUTANTS = [
    ("ablate.contrast:_made", "for part in parts] + [from_items]", "for part in parts]",
     "The choice of the items counts in the error of a score.", "ablate/test_contrasts.py"),
    ("ablate.contrast:contrast", "math.sqrt(2) * assumed.sd", "assumed.sd", "A difference has the variance of two arms.",
     "ablate/test_contrasts.py"),
    ("ablate.verdict:judge", "(m - rank) * one.p", "one.p", "Verdicts hold the family-wise error rate.",
     "ablate/test_contrasts.py ablate/test_simulated.py"),
    ("ablate.contrast:_items",
     "        variance -= float((residuals**2).sum()) / ((seeds - 1) * (count - 1)) / (seeds * count)\n", "",
     "What item means owe to the seeds is not counted twice.", "ablate/test_contrasts.py"),
    ("ablate.contrast:_bound", "(scores * (1 - scores)).sum()", "(scores * (1 - scores)).min()",
     "The bound for unrecorded items has the variance of both arms.", "ablate/test_contrasts.py"),
    ("ablate.contrast:paired", "(arms - 1) * (seeds - 1)", "arms * (seeds - 1)",
     "The paired noise floor loses the degrees of freedom of the seeds.", "ablate/test_contrasts.py"),
    ("ablate.contrast:pooled", "one.df * one.sd**2 for one in known) / df", "one.sd**2 for one in known) / len(known)",
     "Noise floors are pooled by their degrees of freedom.", "ablate/test_contrasts.py ablate/test_results.py"),
    ("ablate.welch:f_upper", "fdtrc(df_above, df_below, f)", "fdtrc(df_below, df_above, f)", "The tail of F is exact.",
     "ablate/test_student.py"),
    ("ablate.verdict:seeds_needed", "max(high, one.seeds + 1)", "high", "More seeds are asked for than there were.",
     "ablate/test_contrasts.py ablate/test_results.py"),
    ("ablate.verdict:_testable", "one.se > 0", "True", "A difference without noise has no verdict.", "ablate/test_contrasts.py"),
]  # fmt: skip
