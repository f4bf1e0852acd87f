"""Chunks cover each extent with aligned reads, and every byte lands in its place, whatever their size."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.reader import Reader
from zinfer.offload.block import SLAB_ALIGNMENT_BYTES, Block, Extent, SlabLayout
from zinfer.offload.chunks import cut_chunks
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.source import DiskSource
from zinfer.offload.stream import HostStream

FILE_BYTES = 300_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    generator = torch.Generator().manual_seed(0)
    paths = [folder / name for name in ("a.bin", "b.bin")]
    for path in paths:
        data = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8, generator=generator)
        path.write_bytes(data.numpy().tobytes())
    return paths


# (file, offset, elements) of one tensor's bytes
pieces = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, FILE_BYTES - 4000), st.integers(1, 1000)), min_size=1, max_size=8
)

chunk_sizes = st.sampled_from([8192, 12288, 40960, 1 << 20])


def make_block(files: list[Path], drawn: list[tuple[int, int, int]], slab_dtype: torch.dtype) -> Block:
    layout = SlabLayout.pack((str(number), slab_dtype, (count,)) for number, (_, _, count) in enumerate(drawn))
    extents = tuple(
        Extent(files[file], offset, 4 * count, torch.float32, tensor.offset, slab_dtype)
        for tensor, (file, offset, count) in zip(layout.tensors, drawn, strict=True)
    )
    return Block(0, "block", layout, extents)


@pytest.mark.parametrize("slab_dtype", [torch.float32, torch.float16])
@given(drawn=pieces, chunk_bytes=chunk_sizes)
def test_spans_are_aligned_and_lie_apart_in_staging(
    files: list[Path], slab_dtype: torch.dtype, drawn: list[tuple[int, int, int]], chunk_bytes: int
) -> None:
    chunks = cut_chunks(make_block(files, drawn, slab_dtype).extents, chunk_bytes)
    assert sum(chunk.wire_bytes for chunk in chunks) == sum(4 * count for _, _, count in drawn)
    for chunk in chunks:
        end = 0
        for span in chunk.spans:
            assert span.staging_offset == end
            end += span.nbytes
            assert span.offset % ALIGNMENT_BYTES == span.nbytes % ALIGNMENT_BYTES == 0
            assert 0 < span.required <= span.nbytes
            assert span.offset + span.required <= FILE_BYTES
        assert chunk.staging_bytes == end <= chunk_bytes


@given(offset=st.integers(0, 5000), chunk_bytes=chunk_sizes)
def test_a_long_tensor_fills_its_chunks(files: list[Path], offset: int, chunk_bytes: int) -> None:
    chunks = cut_chunks(make_block(files, [(0, offset, 70_000)], torch.float32).extents, chunk_bytes)
    assert all(chunk.staging_bytes == chunk_bytes for chunk in chunks[:-1])
    assert sum(chunk.staging_bytes for chunk in chunks) <= 4 * 70_000 + 2 * ALIGNMENT_BYTES


@pytest.mark.sampled(3)
@pytest.mark.parametrize("slab_dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(drawn=pieces, chunk_bytes=chunk_sizes)
def test_every_byte_lands_in_its_place(
    files: list[Path], slab_dtype: torch.dtype, drawn: list[tuple[int, int, int]], chunk_bytes: int
) -> None:
    block = make_block(files, drawn, slab_dtype)
    reader = Reader(num_threads=2, block_bytes=8192)
    source = DiskSource(block, reader, chunk_bytes)
    staging = HostBuffer(chunk_bytes)
    target = torch.full((block.nbytes,), 0x5A, dtype=torch.uint8)
    for part in range(source.num_parts):
        staging.tensor.fill_(0xA5)
        for read in source.load(part, staging):
            read.result()
        source.send(part, HostStream(), target, staging)
    reader.close()
    views = block.layout.views(target)
    for number, (file, offset, count) in enumerate(drawn):
        raw = bytearray(files[file].read_bytes()[offset : offset + 4 * count])
        want = torch.frombuffer(raw, dtype=torch.float32).to(slab_dtype)
        assert torch.equal(views[str(number)].view(torch.uint8), want.view(torch.uint8))


def test_neighbours_move_in_one_copy(files: list[Path]) -> None:
    """Tensors that lie back to back in the file, of sizes that the slab's alignment divides, need one copy."""
    drawn = [(0, 8 + 4 * 64 * number, 64) for number in range(5)]
    (chunk,) = cut_chunks(make_block(files, drawn, torch.float32).extents, 1 << 20)
    assert len(chunk.spans) == len(chunk.placements) == 1
    (cast,) = cut_chunks(make_block(files, drawn, torch.float16).extents, 1 << 20)
    assert len(cast.spans) == 1
    assert len(cast.placements) == 5


@given(shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6))
def test_slab_tensors_are_aligned_and_lie_apart(shapes: list[list[int]]) -> None:
    layout = SlabLayout.pack((str(number), torch.float16, tuple(shape)) for number, shape in enumerate(shapes))
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset % SLAB_ALIGNMENT_BYTES == 0
        assert tensor.offset >= end
        end = tensor.end
    assert layout.nbytes >= end
    assert layout.nbytes % SLAB_ALIGNMENT_BYTES == 0
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert sum(view.numel() for view in views.values()) == layout.numel
