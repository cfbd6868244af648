"""Where lengths and documents come from: Megatron corpora, files, length distributions (standard
library and NumPy).
"""
