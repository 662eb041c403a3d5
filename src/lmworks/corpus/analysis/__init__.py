"""Inspection of a prepared corpus: statistics, samples, the trace of one document, and differences from another corpus.

Everything is read from the output of the corpus stage (decisions/, train/, validation/, report.json, staging/job.json) and, for dropped
text, from the sources again.
"""
