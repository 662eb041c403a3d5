"""Mistakes in units and in what is derived from a recipe."""

MUTANTS = [
    ("recipe.schema.units:_BINARY", '"Ki": 2**10', '"Ki": 10**3', "Ki is 1,024.", "recipe/test_units.py recipe/test_load.py recipe"),
    ("recipe.schema.units:Duration.steps", "-(-self.tokens(step_tokens=step_tokens, phase_tokens=phase_tokens) // step_tokens)",
     "self.tokens(step_tokens=step_tokens, phase_tokens=phase_tokens) // step_tokens", "A duration in tokens is rounded up to whole steps.",
     "recipe/test_units.py recipe"),
    ("recipe.schema.units:Duration.tokens", "phase_tokens / 100", "phase_tokens", "A percentage is of a hundred.",
     "recipe/test_units.py recipe/test_load.py optim/test_schedules.py recipe"),
    ("recipe.schema.units:Duration.interval", "max(1, self.before(", "max(0, self.before(", "An interval is at least one step.",
     "recipe/test_units.py recipe"),
    ("recipe.schema.units:Tokens._validate", "if (tokens := super()._validate(value)) < 1:", "if (tokens := super()._validate(value)) < 0:",
     "A number of tokens is at least 1.", "recipe/test_units.py recipe/test_load.py cli/test_bad_input.py recipe"),
    ("recipe.schema.units:_whole", "if value.denominator != 1:", "if False:", "A fraction of a token is refused.",
     "recipe/test_units.py recipe/test_load.py recipe"),
]  # fmt: skip
