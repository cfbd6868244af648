"""A model of the GPU: what the runtime gives to CUDA's streams, recorded without one, and checked."""
