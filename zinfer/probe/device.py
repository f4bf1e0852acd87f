"""Everything that is measured on one device."""

import torch

from zinfer.probe.compute import matmul_dtype, measure_device_copy, measure_matmul
from zinfer.probe.findings import DeviceFindings
from zinfer.probe.link import measure_link
from zinfer.probe.pcie import PcieLink
from zinfer.probe.sizes import Sizes


def measure_device(device: torch.device, name: str, sizes: Sizes, pcie: PcieLink | None = None) -> DeviceFindings:
    """Its link, its memory and its arithmetic; the memory that this took is given back."""
    dtype = matmul_dtype(device)
    try:
        return DeviceFindings(
            name=name,
            link=measure_link(device, sizes.link_bytes, repeats=sizes.repeats),
            copy_bytes_per_s=measure_device_copy(device, sizes.device_bytes, repeats=sizes.repeats),
            flops_per_s=measure_matmul(
                device, sizes.matmul_width, dtype, num_matmuls=sizes.num_matmuls, repeats=sizes.repeats
            ),
            dtype=str(dtype).removeprefix("torch."),
            pcie=pcie,
        )
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it, and a plan made next would find less free


def read_uuid(device: torch.device) -> str:
    """A GPU's UUID as nvidia-smi writes it, without "GPU-"."""
    return str(torch.cuda.get_device_properties(device).uuid)
