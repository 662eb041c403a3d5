"""Mistakes in reading and comparing answers."""

MUTANTS = [
    ("verify.answers:RightAnswer.judge", "found.equals(right))", "found.value == right.value)", "50% is 0.5 as an answer.",
     "verify/test_answers.py"),
    ("verify.answers:normal", "text.casefold()", "text", "Answers are compared without case.", "verify/test_answers.py"),
    ("verify.answers:right_answer", "return RightAnswer(found, kind) if number(found) else None", "return RightAnswer(found, kind)",
     "A right answer that is no number is refused where numbers are compared.", "verify/test_answers.py"),
    ("verify.answers:same_expression", "    if _is_text(given) or _is_text(right):", "    if False:", "Letters in words do not commute.",
     "verify/test_answers.py"),
    ("verify.numbers:_number", "(int(whole) + Fraction(top) / int(bottom))", "Fraction(top) / int(bottom)",
     "A mixed number has its whole part.", "verify/test_answers.py"),
    ("verify.numbers:_with_scale", "value * _SCALES[scale[1].lower()]", "value", "A number of thousands is scaled.",
     "verify/test_answers.py"),
    ("verify.numbers:final_number", "return None if inside or _IN_FORMULA.match(text, match.end()) else found", "return found",
     "The radicand of a root is not the answer.", "verify/test_answers.py"),
    ("verify.numbers:final_number", 'if one.mark != "said" or re.search("[0-9]", line):', "if False:",
     "A reply that states no number has no number as its answer.", "verify/test_answers.py"),
]  # fmt: skip
