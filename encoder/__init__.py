"""Images and clips to embedding rows: decoding, cutting, packing under token budgets, and running a vision tower."""
