"""Problems, not papers: packing, capacity, assignment. Plain numbers in and out."""
