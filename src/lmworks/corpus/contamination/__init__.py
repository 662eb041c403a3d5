"""Keeping held-out text and evaluation sets out of the training text, by shared n-grams (GPT-3, Brown et al. 2020, appendix C).

A training document that shares a run of 13 words with a held-out document or an evaluation item (question and answer) is contaminated.
Case, punctuation, spaces, line breaks and markup between the words make no difference. Two exceptions keep the gate honest:

- A run found in more than 10 training documents is boilerplate (a licence, a template's greeting), not a leak: it is reported and
  drops nothing. Nor does a run that reaches only a few words beyond boilerplate: at least half of its words must be its own. But an
  evaluation question of 13 words or more that stands *whole* in a document counts all the same, however often it was copied.
- A question shorter than 13 words is looked for whole. One of 5 to 7 words is what people ask anyway, and is a leak only where its answer
  follows within 48 words, as it does in every layout of a test (choices listed, "Answer:" before it, or a letter). One under 5 words
  would match by chance: its answer is looked for, with the question up to 48 words before it, or right before it if that is as short.

In scripts without spaces a character is less than a word: there all these lengths are doubled.

On many machines: every process makes the same `Gate` from the same protected texts; `scan` is a map over the parts of the corpus, whose
`Findings` are added up by `seen`; with that sum each part's `suspects` are judged one by one.
"""

from lmworks.corpus.contamination.gate import HELD_OUT, Boilerplate, Findings, Gate, Match, Question

__all__ = ["HELD_OUT", "Boilerplate", "Findings", "Gate", "Match", "Question"]
