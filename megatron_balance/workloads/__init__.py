"""Sources of lengths and documents: Megatron corpora, files, length distributions (standard library
and NumPy).
"""
