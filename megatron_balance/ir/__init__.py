"""The vocabulary: spans, fragments, ops, programs and plans. Standard library only; everything is
frozen.
"""
