"""Model families: the classes of `transformers` that are exactly our model under some settings, one file each.

A file declares a `FAMILY` (`family.py` says of what it consists; `common.py` holds the parts that several share). `registry.py` finds it,
and everything that lists families reads the registry: import, export, GGUF, refusals, the table in docs/serving.md and the tests.
"""
