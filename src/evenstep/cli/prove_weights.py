from __future__ import annotations

from collections.abc import Sequence


def prove_weights(tolerance: float, commands: Sequence[str], weights: tuple[str, str] | None, *, as_json: bool) -> int:
    return 2
