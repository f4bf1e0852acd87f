"""An engine that reads straight into device memory computes what one does that reads through the host."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint
from kvikio_support import install_kvikio

import zinfer


class DeviceCuFile:
    """kvikio's CuFile over the bytes of a real file, copied to a real device by torch instead of by the driver."""

    num_reads = 0

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def pread(self, buf: torch.Tensor, size: int, file_offset: int) -> SimpleNamespace:
        assert buf.is_cuda
        type(self).num_reads += 1
        content = os.pread(self._fd, size, file_offset)
        assert len(content) == size, "kvikio fails beyond the end of a file"
        buf[:size].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.cuda.synchronize()
        return SimpleNamespace(get=lambda: size)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    install_kvikio(monkeypatch, DeviceCuFile)
    monkeypatch.setattr(DeviceCuFile, "num_reads", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_are_those_of_reads_through_the_host(
    tmp_path: Path, kvikio: None, offload: str, dtype: torch.dtype
) -> None:
    """With a cast too (the checkpoint is float32): raw bytes land on the device and are cast there."""
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=5)
    input_ids, attention_mask = left_padded(random_prompts(3))
    logits = []
    for use_gds in (False, True):
        config = {"zero_optimization": {"offload_param": {"device": offload, "buffer_size": 3000}}, "dtype": dtype}
        engine = zinfer.init_inference(folder, config | {"aio": {"use_gds": use_gds}}, device="cuda")
        logits += [engine(input_ids=input_ids, attention_mask=attention_mask).logits for _ in range(3)]
        stats, plan = engine.stats(), engine.plan
        engine.destroy()
        assert (DeviceCuFile.num_reads > 0) == use_gds, "the embedding at least is resident"
        if offload == "nvme":
            assert stats.disk_bytes_per_pass > 0
            assert (stats.pinned_bytes == 0) == use_gds, "no byte passes through host memory"
        ring_bytes = plan.num_staging * plan.staging_bytes if use_gds else 0
        assert plan.device_bytes >= stats.device_bytes + ring_bytes
    assert all(torch.equal(logits[0], other) for other in logits)


def test_without_kvikio_the_host_is_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a machine without a GPU there is nothing to warn of: the host is the device."""
    folder = tiny_checkpoint("llama", tmp_path / "model")
    engine = zinfer.init_inference(folder, {"aio": {"use_gds": True}}, device="cpu")
    ids = torch.tensor([[1, 2, 3]])
    assert engine(input_ids=ids).logits.isfinite().all()
    engine.destroy()
    assert "GPUDirect" not in caplog.text
