"""Programs in, programs or proofs out: transpose, join, verify."""
