"""Human-readable quantities."""


def counted(number: int, noun: str) -> str:
    """`1 request`, `1,234 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`59s`, `12m`, `3h05m`, `2d04h`."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def size(count: float) -> str:
    """Bytes in binary units: `0 B`, `12.3 KiB`, `4.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
