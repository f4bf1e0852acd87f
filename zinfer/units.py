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


def duration(seconds: float) -> str:
    """Seconds in the units that suit them: ``45 ms``, ``9.87 s``, ``2 min 5 s``, ``2 h 22 min``, ``114 days``."""
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return _two(divmod(whole, 60), "min", "s")
    minutes = round(seconds / 60)
    if minutes < 1440:
        return _two(divmod(minutes, 60), "h", "min")
    hours = round(seconds / 3600)
    if hours < 240:
        days, rest = divmod(hours, 24)
        return _two((days, rest), "day" if days == 1 else "days", "h")
    return f"{round(seconds / 86_400):,} days"


def _two(numbers: tuple[int, int], larger: str, smaller: str) -> str:
    """``2 h 22 min``; nothing is said of none of the smaller unit."""
    return f"{numbers[0]} {larger}" + (f" {numbers[1]} {smaller}" if numbers[1] else "")
