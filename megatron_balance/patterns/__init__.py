"""Communication patterns: how the ranks of a zone meet queries, keys and outputs. One file each."""
