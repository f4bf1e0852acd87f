"""Fills the tensors of a quantized matrix with codes, scales and zeros as other tools count them: unsigned, from 0."""

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantizedMatrix


def fill_codes(target: QuantizedMatrix, octets: torch.Tensor) -> None:
    """Take over codes [rows, at least the bytes of a row] (uint8), packed as the target packs them.

    Symmetric 8-bit codes become signed: unsigned less 128 is the same byte with its highest bit turned over.
    """
    octets = octets[:, : target.codes.shape[1]]
    if target.format.bits == 8 and target.format.symmetric:
        octets = (octets ^ 0x80).view(torch.int8)
    target.codes.copy_(octets)


def fill_scales(target: QuantizedMatrix, scales: torch.Tensor, part: str) -> None:
    """Take over scales [rows or 1, groups], rounded to the target's dtype.

    Raises:
        CheckpointError: a scale is not finite, or becomes infinite or 0 in the target's dtype.
    """
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{part} holds infinities or NaN: the file is damaged, download it again")
    rounded = scales.to(target.dtype)
    lost = ~torch.isfinite(rounded) | ((rounded == 0) & (scales != 0))
    if bool(lost.any()):
        raise CheckpointError(
            f"{part} holds {scales[lost][0].item():g}, beyond {target.dtype}: run the model in bfloat16 or float32"
        )
    target.scales.copy_(rounded)


def fill_zeros(target: QuantizedMatrix, zeros: torch.Tensor | None, part: str) -> None:
    """Take over zeros [rows or 1, groups] (uint8); a symmetric target has none, and they must be the middle code.

    Raises:
        CheckpointError: the target is symmetric and the zeros are not in the middle.
    """
    if target.zeros is not None:
        assert zeros is not None
        target.zeros.copy_(zeros)
        return
    middle = 1 << (target.format.bits - 1)
    if zeros is not None and bool((zeros != middle).any()):
        found = int(zeros[zeros != middle][0])
        raise CheckpointError(
            f"{part} holds the zero {found}, but quantization_config of config.json says that weights are symmetric "
            f"about {middle}: correct config.json (sym of gptq, zero_point of awq)"
        )


def check_group_index(group_index: torch.Tensor, target: QuantizedMatrix, part: str) -> None:
    """Refuse columns whose groups do not follow one another (activation order).

    Args:
        group_index: the group of each column, [columns].

    Raises:
        CheckpointError: neighbouring columns do not share their scale as the target's do.
    """
    size = target.format.group_size or target.columns
    in_order = torch.arange(target.columns, device=group_index.device) // size
    wrong = (group_index != in_order).nonzero()
    if len(wrong):
        column = int(wrong[0])
        raise CheckpointError(
            f"{part} puts column {column} into group {int(group_index[column])} instead of {int(in_order[column])}: "
            f"activation order (desc_act, actorder) scatters groups over the columns, which is not supported; use a "
            f"checkpoint made without it, or with static groups"
        )
