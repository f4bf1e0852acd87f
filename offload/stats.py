"""What a run moved and waited for."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunStats:
    """Counters since the engine was made.

    Of streaming, the blocks that compute has used count; those moved ahead for the next pass do not yet.

    Attributes:
        bytes_read_disk: bytes read, alignment margins and the loading of homes included.
        bytes_to_device: bytes copied into device slots and resident slabs.
        streamed_bytes_per_pass: bytes that one walk over all blocks copies to the device; where a pass leaves some out
            (an encoder's, once its output is there) it copies less.
        disk_bytes_per_pass: the part of them whose home is the disk.
        pinned_bytes: host memory registered with CUDA, now.
        host_bytes: host memory of slabs and staging slots, pinned or not, now.
        device_bytes: device memory of resident slabs and slots, now.
        blocks_by_home: number of blocks by tier: DEVICE, HOST, DISK.
        stall_s: seconds waited, by cause: compute for disk (reads), host (copies between host buffers) and link (copies
            to the device), and copies for compute.
        loaded_bytes: bytes read from disk to fill homes, before the first pass.
        load_s: seconds that filling the homes took.
        link_share: of the link's measured rate, what streaming used over ``span_s``; None before either is known.
        disk_share: of the disk's, likewise.
        kv_bytes_to_device: of the KV cache in host memory, copied to the device.
        kv_bytes_to_host: of those, copied back.
        swapped_bytes_written: of the KV cache of preempted sequences, written to the disk.
        swapped_bytes_read: of those, read again.
        passes: forwards of the whole model.
        wall_s: seconds inside forward and generate calls; on a CUDA device a forward may return before it is computed.
        span_s: seconds from the beginning of the first call until the device was done with the last one, or until now
            where it is not.
    """

    bytes_read_disk: int = 0
    bytes_to_device: int = 0
    streamed_bytes_per_pass: int = 0
    disk_bytes_per_pass: int = 0
    pinned_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    blocks_by_home: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    loaded_bytes: int = 0
    load_s: float = 0.0
    link_share: float | None = None
    disk_share: float | None = None
    kv_bytes_to_device: int = 0
    kv_bytes_to_host: int = 0
    swapped_bytes_written: int = 0
    swapped_bytes_read: int = 0
    passes: int = 0
    wall_s: float = 0.0
    span_s: float = 0.0
