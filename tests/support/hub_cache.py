"""Models in the hub library's cache, laid out as the library does."""

from pathlib import Path

COMMIT = "a" * 40


def put_into_cache(hub_cache: Path, files: dict[str, bytes]) -> Path:
    """A snapshot of org/name with these files; returns the model's folder."""
    folder = hub_cache / "models--org--name"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir(exist_ok=True)
    snapshot_folder = folder / "snapshots" / COMMIT
    snapshot_folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / "blobs" / name).write_bytes(content)
        (snapshot_folder / name).symlink_to(f"../../blobs/{name}")
    return folder
