"""RULER: synthetic tasks of any length that measure how much of its context a model can use."""
