"""Quality rules: per domain (`table`, `measures` of a `Text`), and the published sets with their exact definitions (`published`, of
`Words`).
"""

from lmworks.corpus.rules.rule import Rule, first_broken
from lmworks.corpus.rules.table import RULES, rules_for
from lmworks.corpus.rules.text import Text

__all__ = ["RULES", "Rule", "Text", "first_broken", "rules_for"]
