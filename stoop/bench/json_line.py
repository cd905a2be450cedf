"""The last line of a benchmark's output."""

import json
from pathlib import Path
from typing import Any

from stoop.config.errors import ConfigError


def print_json(record: dict[str, Any], out: Path | None = None) -> None:
    """Print a benchmark's last line, and also write it to `out`."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: rounded(entry) for key, entry in value.items()}
        return [rounded(entry) for entry in value] if isinstance(value, list) else value

    line = json.dumps(rounded(record))
    print(line, flush=True)  # first, so that a full disk does not lose the result
    if out is not None:
        try:
            out.write_text(line + "\n")
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
