"""What a reply states as its answer, for evaluation and for rewards alike."""
