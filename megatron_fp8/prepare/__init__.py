"""Makes token files: reads texts, encodes them, writes, inspects, merges and splits token files. Needs no torch."""
