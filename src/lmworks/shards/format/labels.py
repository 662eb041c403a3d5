"""The special values in the arrays of a batch."""

IGNORE = -100  # a label without loss, as `ignore_index` of torch.nn.functional.cross_entropy
PADDING = 0  # the token in places that no document fills
