"""Log-probabilities of tokens, weighed on the device; the host computes the logarithms."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from zinfer.requests.logprobs import Logprobs
from zinfer.sampling.filters import fixed_point, ratios_of, unit_of

_TURNED: Final = 0x7FFFFFFF
_ID: Final = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Weighed:
    """The values from which the host computes log-probabilities of some rows; sums are integers (see filters).

    nums_top: how many of its most likely tokens each row asks for.
    tensors: on the device, for each row its maximum logit, the sum of likelihoods relative to it, and the logit of its
        token; then ids [rows, most] and logits of the most likely tokens.
    """

    nums_top: Sequence[int]
    vocab_size: int
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, raw_RV: torch.Tensor, token_ids_R: torch.Tensor, nums_top: Sequence[int]) -> "Weighed":
        """Weigh the tokens of rows by their logits; one below 0 has no meaning.

        raw_RV: float32 or shorter. token_ids_R: int64.
        """
        vocab_size = raw_RV.shape[1]
        logits_RV = raw_RV.float()
        peak_R = logits_RV.amax(dim=1)
        totals_R = fixed_point(ratios_of(logits_RV, peak_R)).sum(dim=1)
        chosen_R = logits_RV.gather(1, token_ids_R.clamp(min=0)[:, None])[:, 0]
        own = [min(num, vocab_size) for num in nums_top]
        return cls(own, vocab_size, (peak_R, totals_R, chosen_R, *_most_likely(logits_RV, max(own))))

    def logprobs(self, on_host: Iterator[torch.Tensor]) -> Iterator[Logprobs | None]:
        """Yield log-probabilities row by row, None for rows with non-finite logits.

        Args:
            on_host: begins with `tensors` on the host.
        """
        columns = [next(on_host).tolist() for _ in self.tensors]
        for num, peak, total, chosen, ids, top in zip(self.nums_top, *columns, strict=True):
            if not math.isfinite(peak):
                yield None
                continue
            below = math.log(total / unit_of(self.vocab_size)) + peak
            yield Logprobs(chosen - below, ids[:num], [value - below for value in top[:num]])


def _most_likely(logits_RV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and logits of each row's `num` largest logits; of equal ones the lowest ids come first.

    torch.topk breaks ties arbitrarily, so it gets whole numbers that are all different: the bits of a logit, which
    grow with it once those of negative ones are turned, and after them the id.
    """
    if not num:
        return logits_RV[:, :0].long(), logits_RV[:, :0]
    last = logits_RV.shape[1] - 1
    bits_RV = (logits_RV + 0.0).view(torch.int32).long()  # -0.0 is 0.0
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ _TURNED, bits_RV) << 32
    keys_RN = ordered_RV.add_(torch.arange(last, -1, -1, device=logits_RV.device)).topk(num, dim=1).values
    ids_RN = last - (keys_RN & _ID)
    return ids_RN, logits_RV.gather(1, ids_RN)
