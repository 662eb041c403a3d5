"""Decontamination: removal of training text that shares n-grams with held-out text or evaluation sets (GPT-3, Brown et al. 2020, appendix
C).

A training document that shares a run of 13 words with a held-out document or an evaluation item (question and answer) is contaminated.
Case, accents, invisible characters, forms of letters and digits (`lmworks.text.letters`), punctuation, spaces, line breaks, and markup
between the words (`readings`) are ignored. An underscore is punctuation unless it joins two words, as in a name of a program. A document
with comments is scanned with them as well, and one with many escapes (JSON) unescaped as well. Further rules:

- An evaluation item of 13 words or more also matches if two fifths of its runs of 5 words, and at least six, occur in a stretch a third
  longer than the item: most of it is there, with some words changed.
- A question shorter than 13 words must match whole, and so must an answer of 10 words or more. A question of 5 to 7 words is common in
  ordinary text, so it counts only if its answer follows within 48 words, as it does in every layout of a test (choices listed, "Answer:"
  before it, or a letter). A question under 5 words would match by chance: its answer must match, with the question up to 48 words before
  it, or directly before it if the answer is as short.

Two exceptions avoid false positives; both are reported with names and counts:

- A run of a held-out document that occurs in more than 10 training documents is boilerplate (a license, a template) and drops nothing. The
  same holds for a run that extends only a few words beyond boilerplate: at least half of its words must be outside it. Text of an
  evaluation set is never boilerplate, however often it was copied.
- A run that more than 10 items of an evaluation set share, or half of its items and at least 3, is part of the wording of the set.

In scripts without spaces a character carries less than a word, so all lengths are multiplied: by two in Chinese and Japanese, three in
Burmese, four in Thai, Lao and Khmer. An item with many symbols (at least one per three words: formulas, code, brackets, emoji) is compared
with its symbols, with doubled lengths; so is a held-out document with more symbols than words. In all other text symbols are ignored. If
only the question or only the answer consists of symbols, each is searched for in its own way, unless the question is under 5 words.

On many machines, every process builds the same `Decontaminator` from the same protected texts. `scan` maps over the parts of the corpus,
`count_documents` adds up the `Findings` of all parts, and with this sum the `suspect_documents` of each part are decided one by one
(`find_matches`).
"""

from lmworks.corpus.contamination.decontaminator import HELD_OUT, Decontaminator, Findings, Match, Question, Shared, Widespread

__all__ = ["HELD_OUT", "Decontaminator", "Findings", "Match", "Question", "Shared", "Widespread"]
