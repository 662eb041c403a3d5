"""The steps of `corpus.steps`: one file each, with the options that a recipe sets, what they mean, and the function on documents.

To add a step, add a file here with a subclass of `StepOptions` (see `base.py`). `registry.py` finds it by looking through this folder;
the recipe, docs/recipe.md and the engine take it from there.

A recipe is loaded with the options of all steps, so these files import at their top only the base of recipe nodes, units, the types of
`lmworks.corpus.document`, small files of the floor and the Python standard library. Everything else (numpy, parsers, models) is imported
in the function that needs it. tests/docs/test_architecture.py checks this.
"""
