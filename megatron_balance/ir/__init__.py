"""The vocabulary: spans, fragments, ops, programs and plans. Everything is frozen."""
