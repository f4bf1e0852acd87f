"""What completing some rows will take, before they are computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Of rows that share passes; numbers are 0 where they are not known.

    Attributes:
        text: for people.
        tokens_per_s: new tokens a second.
        seconds: of all these rows.
        num_passes: walks over the weights, likewise.
    """

    text: str
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    num_passes: float = 0.0
