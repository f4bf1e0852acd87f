"""`SizeSpace`: the open sizes of a job as points of a cube, in which sizes that belong together move together. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any, Final, TypeAlias

from zinfer.config.settings import Batching
from zinfer.planning.job_plan import ROWS_TOGETHER, Job
from zinfer.planning.kv_budget import PAGE_SIZE, HostShare, find_kv_dtype
from zinfer.planning.plan import Case

Point: TypeAlias = tuple[float, ...]
"""Bytes of the KV cache, sequences at once, tokens a pass and the order of admission, from 0 to 1 each."""
CORNER: Final[Point] = (0.0, 0.0, 0.0, 0.0)
"""The smallest of all sizes."""
FEW_SEQUENCES: Final[Point] = (0.5, 0.1, 0.9, 0.9)
"""Few sequences, the longest first, in passes that take all their tokens: with few, kernels for small passes are
faster, however many the cache holds."""
SMALL_PASSES: Final[Point] = (0.7, 0.3, 0.0, 0.0)
"""Passes of few tokens each, for which quantized weights are multiplied as they are; of ranks in step none waits for
another's prompts."""

_LEAST_SHARE: Final = 0.02  # of the most bytes
_MOST_DEVICE_SHARE: Final = 0.95  # of device memory; the rest is for weights
_MOST_HOST_SHARE: Final = 0.8  # of what the budgets allow; the rest is for weights, staging and outputs
_MOST_TOKENS: Final = 131_072
_FEWEST_TOKENS: Final = 64
_FEWEST_SEQUENCES: Final = 8
_SMALL: Final = 64  # sequences, which are tried however many the cache holds: see FEW_SEQUENCES
_MOST_TIMES_HELD: Final = 12  # those with few tokens yet take little of the cache
_TIMES_TAKEN: Final = (0.2, 16)  # the tokens of a pass that its sequences take
_CACHE_STEPS: Final = (0.01, 0.02, 0.04, 0.08, 0.12, 0.18)
_NUM_PLACES: Final = 200
_STRIDES: Final = (0.8566749, 0.7338918, 0.6287067, 0.5385973)  # powers of 1 / 1.16730398: they fill a cube evenly


class SizeSpace:
    """Sizes of a job in one form of the KV cache.

    Sequences are those that the cache holds, or more or fewer, and tokens those that the sequences take while as many
    begin as end, or more or fewer.

    Args:
        case: with that form stated; what else is stated is the same at all points.
        job: the job.
    """

    def __init__(self, case: Case, job: Job) -> None:
        self._stated = stated = case.settings.batching
        kv, device_bytes = case.outline.spec.kv, case.machine.usable_bytes
        token_bytes = kv.token_bytes(find_kv_dtype(stated, case.outline.dtype))
        self._most_bytes = device_bytes * _MOST_DEVICE_SHARE
        if stated.kv_cache_tier == "host":
            host = HostShare.find(case.weights, case.settings, case.machine.limits)
            on_device = self._most_bytes * kv.num_layers / kv.num_page_slots
            self._most_bytes = min(host.most_bytes * _MOST_HOST_SHARE, on_device)
        longest_bytes = token_bytes * (sum(job.longest) + (stated.kv_page_size or PAGE_SIZE))
        least_bytes = min(max(self._most_bytes * _LEAST_SHARE, longest_bytes), self._most_bytes)
        self._least_bytes = max(least_bytes, 1)  # a host may have nothing left for pages
        self._prompt, new = fmean(job.prompt_lens), fmean(job.new_tokens)
        self._row_bytes = token_bytes * (self._prompt + new / 2)
        self._row_tokens = self._prompt / new + 1
        self._num_rows = min(job.num_rows, ROWS_TOGETHER)
        self._num_tokens = self._num_rows * (self._prompt + new)
        orders = ["arrival"] if job.has_equal_rows else ["arrival", "longest_first"]
        self._orders: list[Any] = orders if stated.admission_order == "auto" else [stated.admission_order]

    def sizes(self, point: Point) -> Batching:
        """Return the sizes at a point."""
        cache, sequences, tokens, order = point
        nbytes = self._stated.kv_cache_memory or int(_between(self._least_bytes, self._most_bytes, cache))
        count = self._stated.max_sequences or self._count(nbytes, sequences)
        return replace(
            self._stated,
            kv_cache_memory=nbytes,
            max_sequences=count,
            tokens_per_pass=self._stated.tokens_per_pass or self._tokens(count, tokens),
            admission_order=self._orders[min(int(order * len(self._orders)), len(self._orders) - 1)],
        )

    def with_sequences(self, point: Point, count: int) -> Point:
        """Return the point with that many sequences at once, or a few more, and as many tokens a pass or a few more."""
        sizes = self.sizes(point)
        cache, _, _, order = point
        nbytes, tokens = sizes.kv_cache_memory or 0, sizes.tokens_per_pass or 0
        sequences = _place(lambda place: self._count(nbytes, place), count)
        return (
            cache,
            sequences,
            _place(lambda place: self._tokens(self._count(nbytes, sequences), place), tokens),
            order,
        )

    def _count(self, nbytes: int, place: float) -> int:
        """Return sequences at once; at the upper places all rows, where the cache holds many of them."""
        held = min(nbytes / self._row_bytes, self._num_rows)
        fewest = max(min(held / 4, _SMALL), _FEWEST_SEQUENCES)
        most = min(held * _MOST_TIMES_HELD, self._num_rows * 2)
        return max(int(min(_between(fewest, most, place), self._num_rows)), 1)

    def _tokens(self, count: int, place: float) -> int:
        (fewer, more), taken = _TIMES_TAKEN, count * self._row_tokens + self._prompt
        most = min(taken * more, self._num_tokens, _MOST_TOKENS)
        return int(_between(max(taken * fewer, _FEWEST_TOKENS), most, place))


def _between(least: float, most: float, place: float) -> float:
    """Return the number at a place from 0 to 1 between two, by their ratio; the least if it is not below the most."""
    return least * float(max(most / least, 1.0) ** place)


def _place(size_at: Callable[[float], int], least: int) -> float:
    """Return the lowest place, of some, at which a size that grows with it is so large; the highest if none is."""
    return next(
        (place for place in (number / _NUM_PLACES for number in range(_NUM_PLACES)) if size_at(place) >= least), 1.0
    )


def spread(count: int) -> Iterator[Point]:
    """Yield so many points of the cube, evenly."""
    return ((*((0.5 + number * stride) % 1 for stride in _STRIDES),) for number in range(1, count + 1))


def near(center: Point, number: int, width: float) -> Point:
    """Return the point of some number in a cube around another: most are moved along one axis, to and fro by turns."""
    turn, axis = divmod(number, 4)
    if axis < 3:
        offsets = [(0.5 - turn % 2) * (place == axis) for place in range(3)]
    else:
        offsets = [((turn + 1) * stride) % 1 - 0.5 for stride in _STRIDES[:3]]
    moved = (min(max(at + width * offset, 0.0), 1.0) for at, offset in zip(center[:3], offsets, strict=True))
    return (*moved, center[3])


def with_other_caches(point: Point) -> Iterator[Point]:
    """Yield the point with smaller and larger caches, from about half to twice the bytes."""
    places = (point[0] + sign * step for sign in (-1, 1) for step in _CACHE_STEPS)
    return ((place, *point[1:]) for place in places if 0 <= place <= 1)


def in_other_order(point: Point) -> Point:
    """Return the point with the other order of admission."""
    return (*point[:-1], 1 - point[-1])
