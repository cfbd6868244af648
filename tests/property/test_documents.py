"""No token is lost or trained twice in an epoch: across ranks, kills and resumes, and changes of
the number of ranks.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.workloads.documents import CutPolicy, DocumentPiece, DocumentStream, cut, pack

policies = st.sampled_from(["split", "truncate"])
corpora = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(any)
contexts = st.integers(1, 17)
seeds = st.integers(0, 5)


@dataclass(frozen=True)
class Run:
    """One life of a training job, from a start or resume until it is killed."""

    num_replicas: int
    micro_batch_size: int
    num_microbatches: int
    steps: int

    @property
    def global_batch_size(self) -> int:
        return self.num_replicas * self.micro_batch_size * self.num_microbatches


runs = st.lists(
    st.builds(Run, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4
)


def train(
    lengths: list[int], seq_length: int, seed: int, policy: CutPolicy, lives: list[Run]
) -> list[tuple[DocumentPiece, ...]]:
    """Samples in the order of their global batches; every rank of every life opens its own stream,
    as separate processes do.
    """
    read: list[tuple[DocumentPiece, ...]] = []
    for run in lives:
        consumed = len(read)
        streams = [DocumentStream(np.array(lengths), seq_length, seed, policy) for _ in range(run.num_replicas)]
        for step in range(run.steps):
            for microbatch in range(run.num_microbatches):
                # Megatron's sampler: replica r takes the r-th micro_batch_size samples of each
                # microbatch.
                for replica, stream in enumerate(streams):
                    first = consumed + step * run.global_batch_size
                    first += (microbatch * run.num_replicas + replica) * run.micro_batch_size
                    read.extend(stream.sample(first + offset) for offset in range(run.micro_batch_size))
    return read


def times_read(samples: list[tuple[DocumentPiece, ...]], lengths: list[int]) -> list[list[int]]:
    """Times that each token of each document was read."""
    times = [np.zeros(length, dtype=int) for length in lengths]
    for piece in (piece for sample in samples for piece in sample):
        assert 0 <= piece.start < piece.stop <= lengths[piece.document]
        times[piece.document][piece.start : piece.stop] += 1
    return [document.tolist() for document in times]


@given(lengths=corpora, seq_length=contexts, seed=seeds, policy=policies, lives=runs)
def test_every_epoch_reads_every_token_once_across_ranks_and_resumes(
    lengths: list[int], seq_length: int, seed: int, policy: CutPolicy, lives: list[Run]
) -> None:
    samples = train(lengths, seq_length, seed, policy, lives)
    judge = DocumentStream(np.array(lengths), seq_length, seed, policy)
    kept = [length if policy == "split" else min(length, seq_length) for length in lengths]
    once = [[1] * keep + [0] * (length - keep) for keep, length in zip(kept, lengths, strict=True)]
    epoch = 0
    while judge.first_sample(epoch + 1) <= len(samples):
        assert times_read(samples[judge.first_sample(epoch) : judge.first_sample(epoch + 1)], lengths) == once
        epoch += 1
    # The epoch under way: what it has read so far, it has read once.
    under_way = times_read(samples[judge.first_sample(epoch) :], lengths)
    assert all(
        time <= most
        for document, limits in zip(under_way, once, strict=True)
        for time, most in zip(document, limits, strict=True)
    )


@given(lengths=corpora, seq_length=contexts, seed=seeds, policy=policies, lives=runs)
def test_a_run_that_was_killed_reads_what_one_that_was_not_reads(
    lengths: list[int], seq_length: int, seed: int, policy: CutPolicy, lives: list[Run]
) -> None:
    samples = train(lengths, seq_length, seed, policy, lives)
    assert train(lengths, seq_length, seed, policy, [Run(1, 1, 1, len(samples))]) == samples


@given(lengths=corpora, seq_length=contexts, seed=seeds, policy=policies, index=st.integers(0, 60))
def test_samples_hold_whole_pieces_up_to_the_context_length(
    lengths: list[int], seq_length: int, seed: int, policy: CutPolicy, index: int
) -> None:
    stream = DocumentStream(np.array(lengths), seq_length, seed, policy)
    sample = stream.sample(index)
    assert sample
    assert sum(stream.lengths_of(index)) <= seq_length
    pieces = {tuple(row) for row in cut(np.array(lengths), seq_length, policy).tolist()}
    assert pieces.issuperset(sample)


@given(lengths=corpora, seq_length=contexts, seed=seeds)
def test_a_sample_ends_only_where_the_next_piece_does_not_fit_or_the_epoch_ends(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    stream = DocumentStream(np.array(lengths), seq_length, seed, filling="next_fit")
    for epoch in range(3):
        samples = range(stream.first_sample(epoch), stream.first_sample(epoch + 1))
        for index in samples[:-1]:
            assert sum(stream.lengths_of(index)) + stream.lengths_of(index + 1)[0] > seq_length


@given(lengths=corpora, seq_length=contexts, policy=policies)
def test_pieces_tile_what_is_kept_of_a_document(lengths: list[int], seq_length: int, policy: CutPolicy) -> None:
    rows = cut(np.array(lengths), seq_length, policy)
    expected: list[tuple[int, int, int]] = []
    for document, length in enumerate(lengths):
        keep = length if policy == "split" else min(length, seq_length)
        expected += [(document, start, min(start + seq_length, keep)) for start in range(0, keep, seq_length)]
    assert [tuple(row) for row in rows.tolist()] == expected


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=60), seq_length=st.integers(9, 30))
def test_the_vectorised_packing_is_next_fit(lengths: list[int], seq_length: int) -> None:
    bounds, held = [0], 0
    for piece, length in enumerate(lengths):
        if held + length > seq_length:
            bounds.append(piece)
            held = 0
        held += length
    assert pack(np.array(lengths), seq_length).tolist() == [*bounds, len(lengths)]


@given(lengths=corpora, seq_length=contexts, seed=seeds)
def test_epochs_differ_in_order_but_not_in_content(lengths: list[int], seq_length: int, seed: int) -> None:
    stream = DocumentStream(np.array(lengths), seq_length, seed)
    epochs = [
        [
            piece
            for index in range(stream.first_sample(epoch), stream.first_sample(epoch + 1))
            for piece in stream.sample(index)
        ]
        for epoch in range(4)
    ]
    assert all(sorted(pieces) == sorted(epochs[0]) for pieces in epochs)
    if stream.num_pieces >= 6:
        assert any(pieces != epochs[0] for pieces in epochs[1:])
