"""Numbers as people read them."""

from collections.abc import Mapping


def human_bytes(num_bytes: int) -> str:
    """Decimal units, as disks and links are sold: 1 GB is 10^9 bytes."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"


def name_values(parts: Mapping[str, object]) -> str:
    """``{"disk": 1, "link": 2}`` as ``disk 1, link 2``."""
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
