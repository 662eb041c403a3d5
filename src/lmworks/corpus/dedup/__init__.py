"""Deduplication of documents and passages, as functions on arrays. `lmworks.corpus.engine` calls them per part and per band.

1. Reading a part writes the `signatures` of its documents: keys of text and URL, and a sketch with the keys of its bands.
2. `signatures.find_copies` finds equal texts and URLs. For each band, on any machine, `near.candidates` finds the pairs that are equal in
   it. `near.classify_pairs` decides by their sketches which pairs are certainly near-duplicates and which are in doubt; `near.jaccard`
   decides the latter exactly.
3. `near` joins the pairs into clusters. Rows are in the order of priority, so the first row of a cluster is the copy that is kept.
4. `substring` finds passages that occurred earlier, in other documents or in the same one; `semantic` finds documents with similar
   embeddings.
"""
