"""Deduplication of documents and passages, as functions on arrays; `lmworks.corpus.engine` calls them part by part and band by band.

1. Reading a part writes the `traces` of its documents: keys of text and URL (`keys`), and a `sketch` with the keys of its bands.
2. `keys.copies` finds equal texts and URLs. For each band, on any machine, `near.candidates` finds the pairs that are equal in it, and
   `near.classify_pairs` decides by their sketches which are certainly alike and which are in doubt; `near.jaccard` decides those exactly.
3. `clusters` joins the pairs. Rows stand in the order of priority, so the first of a cluster is the copy that is kept.
4. `substring` finds passages that occurred earlier, across documents or within one; `semantic` finds documents of like meaning.
"""
