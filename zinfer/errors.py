"""What zinfer raises for users' mistakes and broken inputs; programmers' errors are assertions."""


class ZinferError(Exception):
    """Root of the errors of configurations, checkpoints, budgets and jobs. Failed reads are `OSError`s of their own."""


class ConfigError(ZinferError, ValueError):
    """A configuration key or value cannot be used; the message names its full path."""


class CheckpointError(ZinferError, ValueError):
    """A checkpoint folder or file cannot be used; the message names the file and what is wrong in it."""


class PlanError(ZinferError, ValueError):
    """The memory budgets cannot hold the work; the message says how much is needed."""


class NonFiniteError(ZinferError, FloatingPointError):
    """A layer gave infinities or NaN; the message names the first that did."""


class LengthError(ZinferError, ValueError, RuntimeError):
    """Input and new tokens together are more than a limit; DeepSpeed's scripts expect a RuntimeError."""


class NotProfiledError(ZinferError, AssertionError):
    """Times of calls were asked for and nobody had them taken; DeepSpeed's scripts expect an AssertionError."""


class JobError(ZinferError):
    """A batch job cannot start or continue: unusable input, an output of another job, a failed disk or engine."""


class RankError(ZinferError, RuntimeError):
    """Another rank failed, or does not answer; the message names the rank, its host and the cause."""


class SilentRankError(RankError):
    """A rank has not answered for long: it was stopped, or hangs.

    Attributes:
        rank: its number.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def silent_rank_of(error: BaseException | None) -> SilentRankError | None:
    """Return the error of a silent rank that this one is or was caused by, if any."""
    while error is not None and not isinstance(error, SilentRankError):
        error = error.__cause__
    return error
