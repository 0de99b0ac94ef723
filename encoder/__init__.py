"""Images to embedding rows: decoding, patching, packing under token budgets and the RADIO vision tower."""
