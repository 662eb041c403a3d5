"""What can be known about a corpus that has been made: its figures, samples of it, the way of one document, what differs from another.

Everything is read from what the corpus stage has left (decisions/, train/, validation/, report.json, staging/job.json) and, for text that
was dropped, from the sources again.
"""
