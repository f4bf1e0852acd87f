"""Codes packed into little-endian 32-bit words, the first code of a row in the lowest bits."""

import torch


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Words [rows, words] (int32) as bytes, [rows, 4 * words] uint8; a view where the words are contiguous."""
    flat = words.contiguous().view(-1)  # a contiguous matrix of one column may have any stride along it
    return flat.view(torch.uint8).view(words.shape[0], 4 * words.shape[1])


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first ``count`` codes of each row of words [rows, words] (int32), [rows, count] uint8; bits are 4 or 8."""
    octets = bytes_of(words)
    if bits == 8:
        return octets[:, :count]
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)[:, :count]
