"""Statistics of an ablation: pure functions of numbers, without files or recipes."""
