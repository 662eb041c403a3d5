"""What a reply states as its answer, and whether that is the right one: for evaluation, for rewards and for the right answers of data sets.

- `verify/marks.py`: the part of a reply after its thoughts, and what it states as its answer
- `verify/numbers.py`: numbers, in the forms in which people and models write them
- `verify/answers.py`: the kinds of comparison, the reading of right answers, and whether two expressions are equal (math-verify, in a
  process with limits)
"""
