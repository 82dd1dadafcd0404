"""What was measured, kept between runs: small files in the cache, named by the circumstances that they hold in.

A profile only shortens learning. A missing, damaged or foreign one is as good as none, and nothing depends on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

FORMAT = 4


def profile_path(*parts: object) -> Path:
    """Where the profile of these circumstances is kept; ``parts`` are paths (by size and time) and settings."""
    key = json.dumps([FORMAT, *(_identity(part) for part in parts)])
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return Path(platformdirs.user_cache_dir("specli")) / "profiles" / f"{name}.json"


def load_profile(path: Path) -> dict[str, object] | None:
    """The kept measurements, or None."""
    try:
        profile = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return profile if isinstance(profile, dict) and profile.get("format") == FORMAT else None


def save_profile(path: Path, measured: Mapping[str, object]) -> bool:
    """Keep ``measured``; whether that was possible (a read-only cache is no reason to fail)."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": FORMAT, **measured}), "utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True


@dataclass(frozen=True, slots=True)
class Profile:
    """A controller's: what passes cost depends on less than how drafts fared, so the two are kept apart."""

    costs: Path
    drafts: Path

    def load(self) -> dict[str, object]:
        """All that there is."""
        return {**(load_profile(self.drafts) or {}), **(load_profile(self.costs) or {})}

    def save(self, measured: Mapping[str, object]) -> None:
        """Keep ``controller.Controller.profile``."""
        save_profile(self.costs, {"costs": measured["costs"]})
        save_profile(self.drafts, {name: value for name, value in measured.items() if name != "costs"})


def _identity(part: object) -> object:
    if isinstance(part, Path):
        try:
            stat = part.stat()
        except OSError:
            return str(part)
        return [str(part.resolve()), stat.st_size, stat.st_mtime_ns]
    return part if isinstance(part, int | float | str | None) else str(part)
