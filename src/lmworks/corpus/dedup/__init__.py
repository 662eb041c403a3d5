"""Which documents and passages are the same, as functions on arrays; `lmworks.corpus.engine` calls them part by part and band by band.

1. A part leaves the `traces` of its documents: keys of text and address (`keys`), and a `sketch` with the keys of its bands.
2. `keys.copies` finds equal texts and addresses. For each band, on any machine, `near.candidates` finds who meets and `near.weigh` tells by
   the sketches who is surely alike and who is in doubt; `near.jaccard` settles that exactly.
3. `clusters` joins the pairs. Rows stand in the order of priority, so the first of a cluster is the copy that is kept.
4. `substring` finds passages that stood earlier, across documents or within one.
"""
