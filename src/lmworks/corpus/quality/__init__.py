"""Learned quality filters: a linear classifier on hashed word n-grams, its training and its evaluation."""
