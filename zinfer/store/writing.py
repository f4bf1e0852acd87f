"""Writes a store block by block, each file atomically; after a killed process the next one resumes.

The order: the manifest, the blocks' files with the manifest replaced after each, the sidecar files, and the manifest
once more, now marked as finished.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import xxhash
from rich.console import Console

from zinfer.config import Settings
from zinfer.display import shown
from zinfer.errors import ConfigError
from zinfer.model.sharding.cut import Shard
from zinfer.nvme.reader import ReadObserver
from zinfer.offload.block import Block
from zinfer.probe.limits import choose_device
from zinfer.store.files import (
    CALIBRATION_NAME,
    COMMAND,
    LOCK_NAME,
    TEMPORARY,
    BlockFile,
    Calibration,
    Caller,
    find_manifest,
    locked,
    place_file,
    sidecar_files,
)
from zinfer.store.pipeline import Meter, Pipeline, StoreSummary, check_device
from zinfer.store.source import Source, part_of, side_of
from zinfer.units import human_bytes
from zinfer.weights.folder import absolute, listed
from zinfer.weights.native import FORMAT_VERSION, Identity, Manifest, StoredBlock

_PIECE_BYTES: Final = 8 << 20  # per write: the granularity of progress and of disk errors


def write_store(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    settings: Settings,
    *,
    calibration: Calibration | None = None,
    console: Console | None = None,
    caller: Caller = COMMAND,
    shard: Shard | None = None,
    observer: ReadObserver | None = None,
) -> StoreSummary:
    """Quantize a checkpoint into a store, or resume one.

    Args:
        model: the checkpoint, as for `zinfer.init_inference`.
        output: a new or empty folder, or one with the same store unfinished.
        settings: what to quantize and how, the dtype, and the device that converts.
        calibration: measures the inputs of weights; columns are then scaled before they are rounded.
        console: shows the progress.
        caller: the words of messages, and whether to wait for another writer.
        shard: the rank whose part of each layer is stored; None: whole layers.
        observer: looks at what is read of the checkpoint.

    Raises:
        ConfigError: settings or output cannot be used.
        CheckpointError: the checkpoint cannot be used; names the weight.
        PlanError: the device has too little memory.
        OSError: the disk is full or failed. Finished blocks are kept.
    """
    device = choose_device(settings)
    with shown(Meter(console)) as meter:
        source = Source.open(model, settings, calibration.squares if calibration else None, shard)
        prompts = calibration.sha256 if calibration else None
        part = part_of(shard, settings)
        side = side_of(source.checkpoint, settings)
        identity = Identity.of(source.checkpoint, source.rules, source.dtype, prompts, part, side)
        folder = absolute(output)
        summary = StoreSummary(
            output=folder,
            num_blocks=len(source.files),
            num_skipped=len(source.files),
            source_bytes=sum(_stored_bytes(file.block) for file in source.files),
            packed_bytes=sum(file.data_bytes for file in source.files),
        )
        manifest = find_manifest(folder, identity, caller)
        if manifest is None or not manifest.finished:
            with locked(folder, caller):
                manifest = find_manifest(folder, identity, caller)  # another process may have finished meanwhile
                manifest = manifest or Manifest(
                    format_version=FORMAT_VERSION, identity=identity, parameters=dict(source.parameters)
                )
                if not manifest.finished:
                    return _Writing(source, manifest, folder, device, meter, calibration, caller, observer).run(summary)
    meter.note(f"{folder} is finished already, from this model with these settings; nothing was written.")
    return summary


@dataclass
class _Writing:
    """The writing of one store, in a locked folder."""

    source: Source
    manifest: Manifest
    folder: Path
    device: torch.device
    meter: Meter
    calibration: Calibration | None
    caller: Caller
    observer: ReadObserver | None = None

    def run(self, summary: StoreSummary) -> StoreSummary:
        """Write the missing files; returns the summary with this run's numbers."""
        for path in self.folder.glob(TEMPORARY):
            path.unlink()
        beside = sidecar_files(self.source.checkpoint, self.source.dtype, self.source.files, self.source.text)
        left = [file for file in self.source.files if not self._is_written(file)]
        self._check_room(left, beside)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # freed by the calibration
        blocks = [file.block for file in left]
        check_device(blocks, self.device, "converting", f", or {self.caller.on_cpu}")
        self._show_start(left)
        calibration = self.calibration if left else None
        if calibration is not None:
            self._calibrate(calibration)
        self.manifest.write(self.folder)
        if calibration is not None:
            calibration.keep(self.folder)
        begin_s = time.perf_counter()
        read_bytes = self._write_blocks(left)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # so that a following plan sees it as free
        for name, data in beside.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            place_file(self.folder / name, [data])
        (self.folder / CALIBRATION_NAME).unlink(missing_ok=True)
        written = {file.file: self.manifest.blocks[file.file] for file in self.source.files}
        self.manifest.model_copy(update={"blocks": written, "finished": True}).write(self.folder)
        (self.folder / LOCK_NAME).unlink()
        wall_s = time.perf_counter() - begin_s
        return replace(summary, num_skipped=summary.num_blocks - len(left), read_bytes=read_bytes, wall_s=wall_s)

    def _calibrate(self, calibration: Calibration) -> None:
        self.meter.note("Measuring what the weights are multiplied with: the model runs over the prompts.")
        calibration.open(self.folder)
        scaled = [name for name, stored in self.source.parameters.items() if stored.format.scales_columns]
        unseen = [name for name in scaled if calibration.squares(name) is None]
        if len(unseen) == len(scaled):
            raise ConfigError(
                "calibration: no prompt reaches a weight that is to be quantized, so there is nothing to scale by; "
                "leave the calibration out"
            )
        if unseen:
            what = f"{len(unseen)} of {len(scaled)} weights were reached by no prompt"
            self.meter.note(f"{what} and are rounded plainly: {listed(unseen)}")

    def _is_written(self, file: BlockFile) -> bool:
        """Whether a former run finished a file; files are synced before the manifest lists them."""
        noted = self.manifest.blocks.get(file.file)
        path = self.folder / file.file
        return noted is not None and path.is_file() and noted.num_bytes == file.num_bytes == path.stat().st_size

    def _check_room(self, left: Sequence[BlockFile], beside: Mapping[str, bytes]) -> None:
        needed = sum(file.num_bytes for file in left) + sum(map(len, beside.values()))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ConfigError(
                f"{self.caller.subject} {self.folder}: {needed:,} bytes ({human_bytes(needed)}) are needed there, "
                f"{free:,} ({human_bytes(free)}) are free; make room, or give another "
                f"{self.caller.option}, on another disk"
            )

    def _show_start(self, left: Sequence[BlockFile]) -> None:
        self.meter.num_blocks = len(self.source.files)
        self.meter.num_written = len(self.source.files) - len(left)
        if self.meter.num_written:
            self.meter.note(f"{self.meter.num_written} of {len(self.source.files)} blocks are there already; going on.")
        if taken_over := self.source.num_taken_over:
            self.meter.note(f"{taken_over} matrices are quantized in the model already and keep their own formats.")

    def _write_blocks(self, left: Sequence[BlockFile]) -> int:
        """Write the blocks; returns the bytes read."""
        if not left:
            return 0

        files = {file.block.index: file for file in left}

        def keep(block: Block, slab: memoryview) -> None:
            file = files[block.index]
            blocks = self.manifest.blocks | {file.file: self._write_block(file, slab)}
            self.manifest = self.manifest.model_copy(update={"blocks": blocks})
            self.manifest.write(self.folder)
            self.meter.num_written += 1

        files_read = self.source.checkpoint.files
        with closing(Pipeline(self.device, files_read, keep, self.observer)) as pipeline:
            self.meter.start(lambda: pipeline.bytes_read, sum(_stored_bytes(file.block) for file in left))
            pipeline.run([file.block for file in left])
            return pipeline.bytes_read

    def _write_block(self, file: BlockFile, slab: memoryview) -> StoredBlock:
        digest = xxhash.xxh3_128()

        def pieces() -> Iterator[bytes | memoryview]:
            yield file.header
            for tensor in file.data(slab):
                for begin in range(0, tensor.nbytes, _PIECE_BYTES):
                    piece = tensor[begin : begin + _PIECE_BYTES]
                    digest.update(piece)
                    yield piece

        place_file(self.folder / file.file, pieces())
        return StoredBlock(name=file.block.name, num_bytes=file.num_bytes, checksum=digest.hexdigest())


def _stored_bytes(block: Block) -> int:
    """Return the bytes of a block in the source."""
    return sum(extent.nbytes for extent in block.read_extents)
