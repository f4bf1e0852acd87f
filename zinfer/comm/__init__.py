"""The part of deepspeed.comm that inference scripts use: ``import zinfer.comm as dist``.

The collectives are those of `torch.distributed`, which has them under the same names.
"""

from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    get_rank,
    get_world_size,
    is_available,
    is_initialized,
    new_group,
    reduce,
)

from zinfer.comm.joining import get_local_rank, init_distributed

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "is_available",
    "is_initialized",
    "new_group",
    "reduce",
]

inference_all_reduce = all_reduce
