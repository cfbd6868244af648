"""No token is lost or trained twice in an epoch; a link brings every weight and every gradient."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.analysis.link import Twins, WeightPiece, elements, link, places, through_nodes, volume
from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable, Shard, held
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.workloads.documents import CutPolicy, DocumentPiece, DocumentStream, cut, pack
from tests.support.links import Links, buffers_of, links, owned_by, stages_of
from tests.support.links import cut as cut_array

policies = st.sampled_from(["split", "truncate"])
corpora = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(any)
contexts = st.integers(1, 17)
seeds = st.integers(0, 5)


@dataclass(frozen=True)
class Run:
    # One life of a training job, from a start or resume until it is killed.
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
    # Samples in the order of their global batches; every rank of every life opens its own stream,
    # as separate processes do.
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
    times = [np.zeros(length, dtype=int) for length in lengths]
    for piece in (piece for sample in samples for piece in sample):
        assert 0 <= piece.start < piece.stop <= lengths[piece.document]
        times[piece.document][piece.start : piece.stop] += 1
    return [document.tolist() for document in times]


@given(lengths=corpora, seq_length=contexts, seed=seeds, policy=policies, lives=runs)
def test_every_epoch_reads_every_token_once_across_ranks_and_resumes(
    lengths: list[int], seq_length: int, seed: int, policy: CutPolicy, lives: list[Run]
) -> None:
    # One that was killed reads what one that was not reads: whole pieces up to the context length.
    samples = train(lengths, seq_length, seed, policy, lives)
    assert train(lengths, seq_length, seed, policy, [Run(1, 1, 1, len(samples))]) == samples
    judge = DocumentStream(np.array(lengths), seq_length, seed, policy)
    pieces = {tuple(row) for row in cut(np.array(lengths), seq_length, policy).tolist()}
    for index, sample in enumerate(samples):
        assert sample
        assert sum(judge.lengths_of(index)) <= seq_length
        assert pieces.issuperset(sample)
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


@given(lengths=corpora, seq_length=contexts, seed=seeds)
def test_a_sample_ends_only_where_the_next_piece_does_not_fit_or_the_epoch_ends(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    # Epochs differ in order but not in content.
    stream = DocumentStream(np.array(lengths), seq_length, seed, filling="next_fit")
    epochs: list[list[DocumentPiece]] = []
    for epoch in range(4):
        samples = range(stream.first_sample(epoch), stream.first_sample(epoch + 1))
        for index in samples[:-1]:
            assert sum(stream.lengths_of(index)) + stream.lengths_of(index + 1)[0] > seq_length
        epochs.append([piece for index in samples for piece in stream.sample(index)])
    assert all(sorted(pieces) == sorted(epochs[0]) for pieces in epochs)
    if stream.num_pieces >= 6:
        assert any(pieces != epochs[0] for pieces in epochs[1:])


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


# The link against its meaning element by element, for any degrees beside one another.

BF16, FP32 = 2, 4


def expanded(table: Ints, number: int, rectangle: slice, case: Links) -> list[list[tuple[int, int]]]:
    # (parameter, element) of each row, row by row of its rectangle.
    rows: list[list[tuple[int, int]]] = []
    for row in table:
        parameter = case.listed[row[number]]
        top, bottom, left, right = row[rectangle]
        whole = np.arange(parameter.rows * parameter.columns).reshape(parameter.rows, parameter.columns)
        rows.append([(int(row[number]), element) for element in whole[top:bottom, left:right].reshape(-1).tolist()])
    return rows


@given(links())
def test_an_owned_shard_is_megatrons_flat_range_in_its_order(case: Links) -> None:
    owned = case.base.owned(case.parameters)
    for rank, expected in owned_by(case).items():
        mine = owned[owned[:, Shard.RANK] == rank]
        rows = expanded(mine, Shard.PARAMETER, Shard.RECTANGLE, case)
        assert [entry for row in rows for entry in row] == expected


@given(links(), st.integers(1, 6))
def test_messages_of_ranks_that_know_only_their_own_rows_bring_every_weight_and_every_gradient(
    case: Links, per_node: int
) -> None:
    # A weight is the number of its element, so each element of each role must come, and once. A
    # gradient from rank r is 4 ** r, so a sum says how often each rank's came to an owner. Ranks of
    # a node that hold the same hand on what one of them received, and one sends what they sum.
    parameters, base = case.parameters, case.base
    owned, ranks = base.owned(parameters), range(base.num_ranks)
    mine = [owned[owned[:, Shard.RANK] == rank] for rank in ranks]
    roles = [held(case.strategy, parameters, rank=rank) for rank in ranks]
    tables = [link(base, owned, case.strategy, parameters, rank) for rank in ranks]

    twins = Twins.of(case.strategy, base.num_ranks, per_node)
    across, inside = zip(
        *(through_nodes(table, parameters, twins, rank) for rank, table in enumerate(tables)), strict=True
    )
    first = _exchanged([t.pull for t in across], mine, roles, [_numbered(shards, case) for shards in mine])
    pulled = _sum(first, _exchanged([t.pull for t in inside], roles, roles, first))
    seats = {rank: (pipeline, cp, stage, tp, scheme) for rank, pipeline, cp, stage, tp, scheme in case.seats()}
    for rank, flats in enumerate(pulled):
        expected: dict[int, Ints] = {}
        if rank in seats:
            *_, stage, tp, scheme = seats[rank]
            expected = {
                number: cut_array(parameter, scheme.tensor, tp).reshape(-1)
                for number, parameter in enumerate(case.listed)
                if stage in stages_of(parameter, scheme.pipeline, case.num_layers)
            }
        assert {number: flat.tolist() for number, flat in flats.items() if len(flat)} == {
            number: flat.tolist() for number, flat in expected.items() if len(flat)
        }

    powers = [{number: np.full_like(flat, 4**rank) for number, flat in pulled[rank].items()} for rank in ranks]
    powers = _sum(powers, _exchanged([t.push for t in inside], roles, roles, powers))
    summed = _exchanged([t.push for t in across], roles, mine, powers)
    for rank, flats in enumerate(summed):
        elements_of = _numbered(mine[rank], case)
        for number, sums in flats.items():
            parameter = case.listed[number]
            holds = np.array([np.isin(elements_of[number], pulled[giver].get(number, [])) for giver in ranks])
            came = sums >> (2 * np.arange(base.num_ranks)[:, None]) & 3
            if parameter.cut is None and not parameter.parts:  # of one TP rank of each that share a stage
                ends = {rank: seat[:3] for rank, seat in seats.items()}
                for seat in set(ends.values()):
                    of = [rank for rank, other in ends.items() if other == seat]
                    assert np.array_equal(came[of].sum(axis=0), holds[of].any(axis=0))
                assert not came[~holds].any()
            else:
                assert np.array_equal(came, holds)


@given(links(), st.integers(1, 6))
def test_what_ranks_of_a_node_have_alike_crosses_nodes_once(case: Links, per_node: int) -> None:
    owned = case.base.owned(case.parameters)
    twins = Twins.of(case.strategy, case.base.num_ranks, per_node)
    whole = link(case.base, owned, case.strategy, case.parameters)
    across, inside = through_nodes(whole, case.parameters, twins, None)
    pull, push = (across.pull, whole.pull, WeightPiece.DST), (across.push, whole.push, WeightPiece.SRC)
    for table, given_table, role in (pull, push):
        owner = WeightPiece.SRC + WeightPiece.DST - role
        sets = twins.members[table[:, role], 0]
        single = (case.parameters.cut >= 0) & ~case.parameters.tied
        far = (table[:, owner] // per_node != table[:, role] // per_node) & single[table[:, WeightPiece.PARAMETER]]
        keys = [(*row, each) for row, each in zip(np.delete(table, role, axis=1)[far].tolist(), sets[far], strict=True)]
        assert len(keys) == len(set(keys))
        assert set(map(tuple, table)) <= set(map(tuple, given_table))
    for table in (inside.pull, inside.push):
        assert (table[:, WeightPiece.SRC] // per_node == table[:, WeightPiece.DST] // per_node).all()
        assert (table[:, WeightPiece.SRC] != table[:, WeightPiece.DST]).all()


@given(links())
def test_both_ends_of_a_message_have_the_same_rows_and_an_owner_adds_by_rank(case: Links) -> None:
    owned = case.base.owned(case.parameters)
    whole = link(case.base, owned, case.strategy, case.parameters)
    rank = case.base.num_ranks - 1
    mine = link(case.base, owned, case.strategy, case.parameters, rank)
    for table, everything in ((mine.pull, whole.pull), (mine.push, whole.push)):
        touched = (everything[:, [WeightPiece.SRC, WeightPiece.DST]] == rank).any(axis=1)
        assert np.array_equal(table, everything[touched])
        assert (np.diff(table[:, WeightPiece.SRC]) >= 0).all()
        assert (elements(table) > 0).all()


@given(links())
def test_the_bases_own_scheme_moves_what_all_gather_and_reduce_scatter_move(case: Links) -> None:
    # CP ranks of the base share an optimizer shard as replicas do, so pipelines lie as its replicas
    # where it has no stages; with stages ranks of a replica are apart.
    listed = tuple(p for p in case.listed if not p.parts)
    scheme, replicas = Scheme(case.base.scheme.tensor, 1, case.base.scheme.context), case.base.replicas
    base = Base(scheme, replicas, buffers_of(listed, case.num_layers, scheme, replicas, 3))
    parameters = ParameterTable.of(listed, case.num_layers)
    owned = base.owned(parameters)
    all_ranks = link(base, owned, Strategy((scheme,) * replicas), parameters)
    own = _elements(owned, base.num_ranks)
    for rank, (sent, received) in enumerate(traffic(all_ranks.pull, base.num_ranks).tolist()):
        others = [base.scheme.tensor * shard + rank % base.scheme.tensor for shard in range(base.num_shards)]
        assert sent == own[rank] * (base.num_shards - 1)
        assert received == sum(own[other] for other in others if other != rank)
    assert np.array_equal(traffic(all_ranks.push, base.num_ranks), traffic(all_ranks.pull, base.num_ranks)[:, ::-1])


@given(links())
def test_a_pull_brings_at_most_a_ranks_weights_and_a_push_takes_them_to_each_copy(case: Links) -> None:
    # B.1: W / TP weights, once into the rank and once out of it; replicated and tied parameters go
    # to every copy of the base.
    parameters = case.parameters
    result = link(case.base, case.base.owned(parameters), case.strategy, parameters)
    pulled, pushed = traffic(result.pull, case.base.num_ranks), traffic(result.push, case.base.num_ranks)
    mine = held(case.strategy, parameters)
    cut_array = (parameters.cut >= 0) & ~parameters.tied
    size = _elements(mine, case.base.num_ranks)
    once = _elements(mine[cut_array[mine[:, Shard.PARAMETER]]], case.base.num_ranks)
    copies = case.base.scheme.tensor * (2 if case.base.scheme.pipeline > 1 else 1)
    assert (BF16 * pulled[:, 1] <= BF16 * size).all()
    assert (FP32 * pushed[:, 0] <= FP32 * (once + copies * (size - once))).all()


def test_degrees_whose_common_multiple_does_not_divide_a_dimension_go_together() -> None:
    # <16,1,1> beside six <8,1,1> and an optimizer cut in 7: LCM 448 does not divide 6,656.
    listed = (Parameter("fc2", 3, 6656, 0, 1), Parameter("qkv", 6656, 3, 0, 0))
    base = Base(Scheme(8), 8, buffers_of(listed, 1, Scheme(8), 8, 2))
    case = Links(listed, 1, base, Strategy((Scheme(16), *(Scheme(8),) * 6)))
    pulled = link(base, base.owned(case.parameters), case.strategy, case.parameters).pull
    kept = pulled[pulled[:, WeightPiece.SRC] == pulled[:, WeightPiece.DST]]
    sizes = (kept[:, WeightPiece.STOPS] - kept[:, WeightPiece.STARTS]).prod(axis=1)
    kept_by_rank = np.bincount(kept[:, WeightPiece.DST], sizes, base.num_ranks).astype(np.int64)
    both = traffic(pulled, base.num_ranks)[:, 1] + kept_by_rank
    assert both.tolist() == [2 * 3 * 416] * 16 + [2 * 3 * 832] * 48


@pytest.mark.parametrize("base_stages", [1, 2])
@pytest.mark.parametrize("role_stages", [1, 2])
def test_both_ends_of_a_tied_embedding_pull_from_their_own_end_and_push_to_both(
    base_stages: int, role_stages: int
) -> None:
    # Ranks of the base: two replicas a stage. One pipeline in the role.
    listed = (Parameter("embedding", 4, 2, "first", 0, tied=True), Parameter("norm", 2, 1, 0), Parameter("n", 2, 1, 1))
    scheme = Scheme(1, base_stages)
    base = Base(scheme, 2, buffers_of(listed, 2, scheme, 2, 3))
    parameters = ParameterTable.of(listed, 2)
    result = link(base, base.owned(parameters), Strategy((Scheme(1, role_stages),)), parameters)
    backwards = result.push[:, [WeightPiece.DST, WeightPiece.SRC, *range(2, WeightPiece.WIDTH)]]
    ends = [
        sorted({(int(row[WeightPiece.DST]), int(row[WeightPiece.SRC]) // 2) for row in table})
        for table in (pieces[pieces[:, WeightPiece.PARAMETER] == 0] for pieces in (result.pull, backwards))
    ]
    pulled = [(rank, min(rank, base_stages - 1)) for rank in range(role_stages)]
    pushed = [(rank, stage) for rank in range(role_stages) for stage in range(base_stages)]
    assert ends == [pulled, pushed]


def test_buffers_that_do_not_hold_the_model_and_pieces_outside_of_a_ranks_shards_are_refused() -> None:
    parameters = ParameterTable.of((Parameter("a", 4, 2, 0, 0), Parameter("b", 2, 1, 0)), 1)

    def base(numbers: list[int], starts: list[int], end: int, tensor: int = 1) -> Base:
        buffer = Buffer(0, np.array(numbers), np.array(starts), np.array([0, end]))
        return Base(Scheme(tensor), 2, (buffer,))

    assert _elements(base([1, 0], [0, 2], 10).owned(parameters), 2).tolist() == [5, 5]
    for wrong, message in (
        (base([0], [0], 10), "parameter b of stage 0 is 0 times in them, expected 1"),
        (base([1, 0, 1], [0, 2, 10], 12), "parameter b of stage 0 is 2 times"),
        (base([1, 0], [0, 1], 10), "overlap"),
        (base([1, 0], [0, 2], 8), "outside of its 8 elements"),
        (base([1, 0], [0, 2], 11), "multiple of the 2"),
        (base([1, 0], [0, 2], 10, tensor=3), "parameter a: 4 elements .* TP 3 does not divide"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong.owned(parameters)
    right = base([1, 0], [0, 2], 10)
    for strategy, rank in (("3*tp1-pp1-cp1", 0), ("tp1-pp1-cp1", 2)):
        with pytest.raises(ConfigError, match="the base layout has 2"):
            link(right, right.owned(parameters), Strategy.parse(strategy), parameters, rank)
    owned = right.owned(parameters)
    table = link(right, owned, Strategy((Scheme(2),)), parameters, 0)
    with pytest.raises(ConfigError, match="lies in 0 of this rank's shards"):
        places(table.pull, owned[owned[:, Shard.RANK] == 1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ParameterTable.of([Parameter("a", 2, 2, 0)] * 2, 1), "a comes twice"),
        (lambda: ParameterTable.of([Parameter("a", 2, 2, 3)], 1), "layer 3 of a model with 1"),
        (lambda: Parameter("a", 0, 2, 0), "must be 1 or more"),
        (lambda: Parameter("a", 3, 2, 0, 0, blocks=2), "blocks divide the rows"),
        (lambda: Parameter("a", 4, 2, 0, 1, blocks=2), "cut along dimension 0"),
        (lambda: Parameter("a", 4, 2, 0, 0, parts=True), "only a replicated gradient"),
        (lambda: Parameter("a", 4, 2, 0, 0, tied=True), "its layer is 'first'"),
    ],
)
def test_a_parameter_or_a_table_of_them_that_cannot_be_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()


def _numbered(shards: Ints, case: Links) -> dict[int, Ints]:
    # The flat tensor of each parameter of one rank, with the numbers of its elements.
    flats: dict[int, list[int]] = {}
    for row in expanded(shards, Shard.PARAMETER, Shard.RECTANGLE, case):
        for number, element in row:
            flats.setdefault(number, []).append(element)
    return {number: np.array(flat, dtype=np.int64) for number, flat in flats.items()}


def _exchanged(
    tables: list[Ints], sending: list[Ints], receiving: list[Ints], values: list[dict[int, Ints]]
) -> list[dict[int, Ints]]:
    # Flat tensors of each rank after all messages, added to zeros; a rank reads its own table.
    messages: dict[tuple[int, int], list[int]] = {}
    for rank, table in enumerate(tables):
        out = table[table[:, WeightPiece.SRC] == rank]
        for row, place in zip(out, places(out, sending[rank]), strict=True):
            content = values[rank][place[0]][_indices(place)]
            messages.setdefault((rank, int(row[WeightPiece.DST])), []).extend(content.tolist())
    found: list[dict[int, Ints]] = []
    for rank, table in enumerate(tables):
        sizes = (receiving[rank][:, Shard.STOPS] - receiving[rank][:, Shard.STARTS]).prod(axis=1)
        flats = {
            int(number): np.zeros(int(sizes[receiving[rank][:, Shard.PARAMETER] == number].sum()), dtype=np.int64)
            for number in np.unique(receiving[rank][:, Shard.PARAMETER])
        }
        into = table[table[:, WeightPiece.DST] == rank]
        for row, place in zip(into, places(into, receiving[rank]), strict=True):
            message, size = messages[int(row[WeightPiece.SRC]), rank], int(place[2] * place[3])
            flats[int(place[0])][_indices(place)] += np.array(message[:size])
            del message[:size]
        found.append(flats)
    assert not any(messages.values()), "a message was longer than its receiver expected"
    return found


def _sum(one: list[dict[int, Ints]], other: list[dict[int, Ints]]) -> list[dict[int, Ints]]:
    return [
        {number: flat + more.get(number, 0) for number, flat in flats.items()}
        for flats, more in zip(one, other, strict=True)
    ]


def _indices(place: Ints) -> Ints:
    _, start, rows, columns, stride = place
    return (start + stride * np.arange(rows)[:, None] + np.arange(columns)).reshape(-1)


def traffic(pieces: Ints, num_ranks: int) -> Ints:
    # Elements that each rank sends and receives [num_ranks, 2], without those it keeps.
    return volume(pieces, 1, num_ranks, 1).sum(axis=1)


def _elements(shards: Ints, num_ranks: int) -> Ints:
    counts = (shards[:, Shard.STOPS] - shards[:, Shard.STARTS]).prod(axis=1)
    return np.bincount(shards[:, Shard.RANK], counts, num_ranks).astype(np.int64)
