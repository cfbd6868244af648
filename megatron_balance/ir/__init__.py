"""The vocabulary: spans, fragments, ops, programs, plans. Frozen; but `arrays`, without NumPy."""
