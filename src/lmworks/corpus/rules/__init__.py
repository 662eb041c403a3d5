"""Quality rules per domain: what is measured (`measures`), on what (`text`), and with which thresholds (`table`)."""

from lmworks.corpus.rules.table import RULES, Rule, judge, rules_for
from lmworks.corpus.rules.text import Text

__all__ = ["RULES", "Rule", "Text", "judge", "rules_for"]
