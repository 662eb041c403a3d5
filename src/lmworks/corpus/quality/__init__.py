"""Learned quality: a linear classifier on hashed n-grams of words, its training and its evaluation."""
