"""Learned quality: a linear classifier on hashed n-grams of words, how it is trained, and how well it does."""
