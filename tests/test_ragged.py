"""Ragged batches: every token, position, place and page, against what plain loops make of the same chunks."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.batching.ragged import BatchBuilder, Pending, RaggedBatch
from zinfer.planning.pass_sizes import logit_rows
from zinfer.scheduling.schedule import Chunk, Chunks
from zinfer.scheduling.sequence import PENDING, Sequence

CPU = torch.device("cpu")


def check(batch: RaggedBatch, chunks: list[Chunk], page_size: int, most_part_tokens: int | None) -> None:
    tokens = [(chunk.sequence, at) for chunk in chunks for at in range(chunk.begin, chunk.end)]
    assert batch.input_ids.tolist() == [[sequence.tokens(at, at + 1)[0] for sequence, at in tokens]]
    assert batch.position_ids.tolist() == [[at for _, at in tokens]]
    ends = {chunk.sequence: chunk.end for chunk in chunks}
    least = {chunk.sequence: chunk.end - chunk.samples - chunk.num_extra_logits for chunk in chunks}
    wanted = [number for number, (sequence, at) in enumerate(tokens) if least[sequence] <= at < ends[sequence]]
    assert batch.wanted.tolist() == wanted
    assert [part.tokens.start for part in batch.parts] == list(range(0, len(tokens), most_part_tokens or len(tokens)))
    seen = 0
    for part in batch.parts:
        own, layout = tokens[part.tokens], part.layout
        assert part.places.tolist() == [
            sequence.pages[at // page_size] * page_size + at % page_size for sequence, at in own
        ]
        starts = layout.query_starts.tolist()
        assert starts[-1] == len(own)
        assert layout.most_queries == max(end - begin for begin, end in itertools.pairwise(starts))
        assert layout.most_context == max(layout.context_lengths.tolist())
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            sequence, at = own[end - 1]
            assert {each for each, _ in own[begin:end]} == {sequence}
            assert layout.context_lengths[row] == at + 1
            num_pages = -(-(at + 1) // page_size)
            assert layout.page_table[row, :num_pages].tolist() == sequence.pages[:num_pages]
        if layout.num_decodes is not None:
            sizes = [end - begin for begin, end in itertools.pairwise(starts)]
            assert [size == 1 for size in sizes] == [place < layout.num_decodes for place in range(len(sizes))]
        seen += len(own)
    assert seen == len(tokens) == batch.num_tokens


@given(wanted=st.integers(0, 5000))
def test_a_gpu_computes_few_more_logits_than_are_wanted(wanted: int) -> None:
    assert wanted <= logit_rows(wanted) <= 2 * wanted
    assert logit_rows(wanted) - wanted < 64
    assert len({logit_rows(each) for each in range(wanted)}) <= 8 + wanted // 64


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=9),
    page_size=st.sampled_from([1, 4, 16]),
    most_part_tokens=st.sampled_from([None, 1, 5, 64]),
    data=st.data(),
)
def test_every_number(
    lengths: list[tuple[int, int, int]], page_size: int, most_part_tokens: int | None, data: st.DataObject
) -> None:
    builder = BatchBuilder(page_size, CPU, most_part_tokens)
    free = iter(range(10_000))
    sequences = [
        Sequence(number, tuple(range(100 * number, 100 * number + prompt)), 50, list(range(7000, 7000 + output)))
        for number, (prompt, output, _) in enumerate(lengths)
    ]
    for _ in range(4):
        chunks = []
        for sequence, (_, _, most) in zip(sequences, lengths, strict=True):
            if data.draw(st.booleans(), label="parked and resumed, or recomputed"):
                sequence.pages = []
            if sequence.num_computed == sequence.num_tokens:
                sequence.output_ids.append(8000 + sequence.num_tokens)
            end = min(sequence.num_computed + most, sequence.num_tokens)
            while len(sequence.pages) * page_size < end:
                sequence.pages.append(next(free))
            samples = end == sequence.num_tokens
            extra = data.draw(st.integers(0, end - sequence.num_computed - samples), label="extra logits")
            chunks.append(Chunk(sequence, sequence.num_computed, end, samples, extra))
        assert [*Chunks(chunks)] == [Chunks(chunks)[place] for place in range(-len(chunks), 0)] == chunks
        check(builder.build(Chunks(chunks)), chunks, page_size, most_part_tokens)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end


def test_sequences_come_and_go() -> None:
    builder = BatchBuilder(4, CPU)
    free = iter(range(10_000))
    for first in range(0, 300, 7):
        prompts = [tuple(range(2 + number % 60)) for number in range(first, first + 20)]
        sequences = [Sequence(first + place, prompt, 5) for place, prompt in enumerate(prompts)]
        for sequence in sequences:
            sequence.pages = [next(free) % 9973 for _ in range(-(-sequence.num_tokens // 4))]
        chunks = [Chunk(sequence, 0, sequence.num_tokens, True) for sequence in sequences]
        check(builder.build(Chunks(chunks)), chunks, 4, None)


def test_decodes_that_come_first_are_counted() -> None:
    sequences = [Sequence(number, (5,) * 9, 3, pages=[number]) for number in range(4)]
    builder = BatchBuilder(16, CPU)
    ones = [Chunk(sequence, 8, 9, True) for sequence in sequences[:3]]
    more = Chunk(sequences[3], 2, 6, False)
    assert builder.build(Chunks([*ones, more])).parts[0].layout.num_decodes == 3
    assert builder.build(Chunks([more])).parts[0].layout.num_decodes == 0
    assert builder.build(Chunks([ones[0], more, ones[1]])).parts[0].layout.num_decodes is None


@given(
    outputs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6), st.booleans()), min_size=1, max_size=8),
    prompt=st.integers(0, 9),
)
def test_decodes_are_the_same_as_the_chunks_that_they_stand_for(
    outputs: list[tuple[int, int, bool]], prompt: int
) -> None:
    sequences = [
        Sequence(number, [number] * size, 9, [*range(50, 49 + output), PENDING if waits else 49])
        for number, (size, output, waits) in enumerate(outputs)
    ]
    for place, sequence in enumerate(sequences):
        sequence.num_computed, sequence.pages = sequence.num_tokens - 1, [2 * place, 2 * place + 1]
    decodes = Chunks.of_decodes(sequences)
    plain = Chunks(decodes)
    assert [*plain] == [*decodes]
    assert (plain.num_decodes, decodes.num_decodes) == (0, len(sequences))
    for chunks in (plain, decodes) if prompt else ():
        chunks.append(Chunk(Sequence(99, range(100, 110), 9, pages=[90]), 0, prompt, False))
    pending = Pending(torch.arange(1000, 1000 + len(sequences)), {number: number for number in range(len(sequences))})
    builder = BatchBuilder(16, CPU)
    one, other = (builder.build(chunks, pending) for chunks in (plain, decodes))
    wanted = [1000 + number if waits else 49 for number, (_, _, waits) in enumerate(outputs)]
    for batch in (one, other):
        assert batch.input_ids.tolist() == [[*wanted, *range(100, 100 + prompt)]]
        assert batch.wanted.tolist() == list(range(len(sequences)))
    assert torch.equal(one.position_ids, other.position_ids)
    assert torch.equal(one.parts[0].places, other.parts[0].places)
    assert torch.equal(one.parts[0].layout.page_table, other.parts[0].layout.page_table)
