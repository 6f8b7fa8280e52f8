"""The colocated pool: one worker that prefills and decodes, the baseline that the split is compared with."""
