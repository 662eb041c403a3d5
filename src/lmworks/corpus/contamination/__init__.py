"""Keeping held-out text and evaluation sets out of the training text, by shared n-grams (GPT-3, Brown et al. 2020, appendix C).

A training document that shares a run of 13 words with a held-out document or an evaluation item (question and answer) is contaminated.
Case, punctuation, spaces, line breaks, and tags and entities between the words make no difference; a document with more escapes than line
ends (JSON) is read unescaped as well. Beyond runs:

- An evaluation item of 13 words or more counts as well where two fifths of its runs of 5 words, and at least six, stand in a stretch a
  third longer than it: most of it is there, with a word changed here and there.
- A question shorter than 13 words is looked for whole, an answer of 10 words or more, too. A question of 5 to 7 words is what people ask
  anyway, and is a leak only where its answer follows within 48 words, as it does in every layout of a test (choices listed, "Answer:"
  before it, or a letter). One under 5 words would match by chance: its answer is looked for, with the question up to 48 words before it,
  or right before it if that is as short.

Two exceptions keep the gate honest, and both are told to the user by name and number:

- A run of a held-out document that stands in more than 10 training documents is boilerplate (a license, a template's greeting) and drops
  nothing. Nor does a run that reaches only a few words beyond boilerplate: at least half of its words must be its own. What is in an
  evaluation set is never boilerplate, however often it was copied.
- A run that more than 10 items of an evaluation set share, or half of its items and at least 3, is how the set asks.

In scripts without spaces a character is less than a word: there all these lengths are doubled. An item made of symbols (at least one for
three words: formulas, code, brackets, emoji) is compared symbol by symbol, with the lengths doubled, too; so is a held-out document with
more symbols than words. In all other text symbols do not matter.

On many machines: every process builds the same `Decontaminator` from the same protected texts; `scan` is a map over the parts of the
corpus, whose `Findings` are added up by `seen`; with that sum each part's `suspects` are judged one by one.
"""

from lmworks.corpus.contamination.decontaminator import HELD_OUT, Decontaminator, Findings, Match, Question, Shared, Widespread

__all__ = ["HELD_OUT", "Decontaminator", "Findings", "Match", "Question", "Shared", "Widespread"]
