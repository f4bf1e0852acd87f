"""Memory limits of the control groups that this process runs in: its own and every parent's, cgroup v1 and v2.

SLURM, systemd slices and nested containers limit a process by groups below the root of the hierarchy, and the smallest
limit on the way to the root holds. The kernel's documentation: admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # a space in a path is "\040" in mountinfo
_NO_LIMIT: Final = 1 << 62  # v1 writes "no limit" as the largest multiple of a page in 63 bits


@dataclass(frozen=True)
class GroupMemory:
    """A limit of one control group.

    Attributes:
        file: that states the limit.
        limit_bytes: the limit.
        used_bytes: what the group and those below it use of it.
        cached_bytes: the part of it in the page cache, which the kernel reclaims before it refuses memory.
    """

    file: Path
    limit_bytes: int
    used_bytes: int
    cached_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left of the limit."""
        return max(0, self.limit_bytes - self.used_bytes + self.cached_bytes)


@dataclass(frozen=True)
class _Version:
    """How one version of cgroups names a group's files; ``limits`` maps each limit to the usage that it bounds."""

    limits: Mapping[str, str]
    cached: tuple[str, ...]


# `memory.high` throttles a group that exceeds it until nothing moves, so it counts as a limit.
_V2: Final = _Version(
    {"memory.max": "memory.current", "memory.high": "memory.current"}, ("inactive_file", "active_file")
)
# `memsw` limits memory and swap together. In v2 swap has a limit of its own, which takes nothing from memory.
_V1: Final = _Version(
    {
        "memory.limit_in_bytes": "memory.usage_in_bytes",
        "memory.memsw.limit_in_bytes": "memory.memsw.usage_in_bytes",
    },
    ("total_inactive_file", "total_active_file"),
)


def memory_limit() -> int | None:
    """Return the smallest memory limit of this process's groups in bytes; None: no limit."""
    return min((group.limit_bytes for group in limited_groups()), default=None)


def free_group_bytes() -> int:
    """Return the bytes that every group of this process leaves it; `sys.maxsize` without a limit."""
    return min((group.free_bytes for group in limited_groups()), default=sys.maxsize)


def free_host_bytes() -> int:
    """Return the host memory that this process can use now."""
    import psutil

    return min(int(psutil.virtual_memory().available), free_group_bytes())


def limited_groups() -> Iterator[GroupMemory]:
    """Yield each memory limit of this process's group and of all its parents."""
    for version, mount, folder in _memory_hierarchies():
        for group in (folder, *folder.parents):
            yield from _limits_of(group, version)
            if group == mount:
                break


def _memory_hierarchies() -> Iterator[tuple[_Version, Path, Path]]:
    """Yield the hierarchies that can limit memory: the version, where it is mounted, and this process's folder."""
    own_paths = _own_paths()
    for mount_root, mount_point, kind, options in _mounts():
        if kind == "cgroup2" and "" in own_paths:
            version, path = _V2, own_paths[""]
        elif kind == "cgroup" and "memory" in options and "memory" in own_paths:
            version, path = _V1, own_paths["memory"]
        else:
            continue
        mount = _ROOT / mount_point.lstrip("/")
        below = PurePosixPath(path)
        # A container may see its path on the host beside a mount that shows only its own group, which is the mount.
        inside = below.is_relative_to(mount_root) and ".." not in below.parts
        yield version, mount, mount / below.relative_to(mount_root) if inside else mount


def _own_paths() -> dict[str, str]:
    """Return the paths of this process's groups by v1 controller; v2's under "".

    Lines of /proc/self/cgroup are "4:memory:/slurm/job_5" and "0::/user.slice".
    """
    paths: dict[str, str] = {}
    for line in _lines("proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _mounts() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield of each mount its root in the file system, its place, the kind of file system and its options.

    A line of /proc/self/mountinfo is "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory".
    """
    for line in _lines("proc/self/mountinfo"):
        fields, _, about = line.partition(" - ")
        root, point = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields.split()[3:5])
        kind, _, options = about.split(" ", 2)
        yield root, point, kind, options.split(",")


def _limits_of(group: Path, version: _Version) -> Iterator[GroupMemory]:
    for name, usage in version.limits.items():
        try:
            stated = (group / name).read_text().strip()
        except FileNotFoundError:  # a root, a group without the controller, swap that is not counted
            continue
        if stated == "max" or int(stated) >= _NO_LIMIT:
            continue
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached_bytes = sum(int(counts[each]) for each in version.cached)
        yield GroupMemory(group / name, int(stated), int((group / usage).read_text()), cached_bytes)


def _lines(name: str) -> list[str]:
    try:
        return (_ROOT / name).read_text().splitlines()
    except FileNotFoundError:  # a kernel without control groups
        return []
