"""What a reply states as its answer, and whether that is the right one: for evaluation, for rewards and for the right answers of data sets.

    thoughts.py   the part of a reply after its thoughts
    marks.py      what that part states as its answer
    numbers.py    numbers, in the forms in which people and models write them
    symbolic.py   whether two expressions are equal, by math-verify in a process with limits
    answers.py    the kinds of comparison, and the reading of right answers
"""
