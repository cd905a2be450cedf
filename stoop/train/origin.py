"""Records the options that data was made with, and refuses a run that does not match them.

More prompts and a higher --invent only add to the data, and so does a higher --answers as long as
it leaves the existing answers valid. The device, the number of workers, the batch size, memory and
the time budget may change from run to run.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoop.config.errors import ConfigError
from stoop.text.prompts import Conversation, read_prompts
from stoop.train.files import read_records, write_json, written_aside
from stoop.train.job import Job
from stoop.train.settings import advise, as_flag
from stoop.train.shards import INVENTED, all_folders, read_manifest, read_shard, shard_files

OPTIONS, PROMPTS = "options.json", "prompts.npy"
INVENTING = ("seed", "dtype", "max_len")  # options that determine invented prompts
ANSWERING = ("max_answer", "temperature", "greedy_share", "answers")  # and their answers
WAYS_OUT = "use another --out, or --fresh-data to discard the data and make it again"
BLOCKS, BLOCK_BYTES = 256, 4096  # sampled from each weights file


@dataclass(frozen=True)
class Origin:
    """The options and prompts that data was made with."""

    options: dict[str, Any]
    prompts: np.ndarray  # [prompts] uint64, hashes of the given prompts in ascending order


def describe(job: Job, prompt_files: Sequence[Path]) -> Origin:
    """Return the origin of the data that this job makes."""
    config, data = job.config(), asdict(job.settings.data)
    conversations = [each for path in prompt_files for each in read_prompts(path)]
    options = {
        "target": job.target,
        "target_files": digest_target(Path(config.load.folder)),
        "seed": job.settings.seed,
        "dtype": config.device.dtype,
        **{name: data[name] for name in ("max_len", *ANSWERING, "invent")},
        "prompts": [str(path) for path in prompt_files],
    }
    return Origin(options, hash_prompts(conversations))


def read_origin(root: Path) -> Origin | None:
    if not (root / OPTIONS).exists():
        return None
    return Origin(json.loads((root / OPTIONS).read_text()), np.load(root / PROMPTS))


def write_origin(root: Path, origin: Origin) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with written_aside(root / PROMPTS) as aside, aside.open("wb") as file:
        np.save(file, origin.prompts)
    write_json(root / OPTIONS, origin.options)


def settle_origin(job: Job, new: Origin) -> None:
    """Refuse options that do not match the existing data; record those that do."""
    root, old = job.data, read_origin(job.data)
    if old is not None:
        _check(root, old, new)
    elif _has_data(root):
        _check_unrecorded(root, new)
        job.say(
            f"data: {root} does not record its options; assuming that they are those of this "
            "command"
        )
    write_origin(root, new)


def check_target(job: Job, digest: str) -> None:
    """Refuse data that records another target."""
    old = read_origin(job.data)
    if old is not None:
        _check_target(job.data, old.options, job.target, digest)


def check_given(job: Job, prompt_files: Sequence[Path]) -> None:
    """Refuse given data options that do not match the existing data, if no data is to be made."""
    old = read_origin(job.data)
    if old is None:
        return
    now = asdict(job.settings.data)
    was = now | old.options
    for name in (*ANSWERING, "invent"):
        if name in job.given and now[name] != was[name]:
            raise ConfigError(
                f"{job.data} was made with {as_flag(name, was[name])}, not "
                f"{as_flag(name, now[name])}: leave the option out, or run --stage data first"
            )
    if prompt_files:
        found = hash_prompts(each for path in prompt_files for each in read_prompts(path))
        if not np.array_equal(found, old.prompts):
            raise ConfigError(
                f"{job.data} was made with other prompts than {_names(prompt_files)}: leave "
                "--prompts out, or run --stage data first"
            )


def discard_data(job: Job) -> None:
    """Delete the files of a data stage and the checkpoint trained on them, but no other files."""
    had_data = _has_data(job.data)
    patterns = ("shard-*.npz", "manifest.json", INVENTED, OPTIONS, PROMPTS, "*.unfinished")
    found = [path for f in all_folders(job.data) for each in patterns for path in f.glob(each)]
    for path in [*found, job.train / "checkpoint.pt", job.train / "log.jsonl"]:
        path.unlink(missing_ok=True)
    job.forget_commands()
    if had_data:
        job.say(f"data: discarded what was in {job.data}, and the checkpoint trained on it")


# ---- comparing ----


def _has_data(root: Path) -> bool:
    return _has_answers(root) or any(read_records(f / INVENTED) for f in all_folders(root))


def _has_answers(root: Path) -> bool:
    return any(shard_files(folder) for folder in all_folders(root))


def _check(root: Path, old: Origin, new: Origin) -> None:
    if not _has_data(root):
        return
    # Options that an earlier version did not record are not compared.
    was, now, answered = new.options | old.options, new.options, _has_answers(root)
    _check_target(root, was, now["target"], now["target_files"])
    for name in (*INVENTING, *(ANSWERING if answered else ())):
        if was[name] != now[name] and not (name == "answers" and _only_adds_answers(was, now)):
            raise _refusal(root, name, was[name], now[name])
    found = {each["prompt"] for f in all_folders(root) for each in read_records(f / INVENTED)}
    if now["invent"] < min(was["invent"], len(found)):
        raise _refusal(root, "invent", was["invent"], now["invent"])
    lacking = len(np.setdiff1d(old.prompts, new.prompts)) if answered else 0
    if lacking:
        raise ConfigError(
            f"{root} has answers to prompts of {_names(was['prompts'])}, of which {lacking:,} are "
            f"not in {_names(now['prompts']) or 'this command'}: give those prompts too, {WAYS_OUT}"
        )


def _check_target(root: Path, was: dict[str, Any], target: str, digest: str) -> None:
    """Compare targets by their files: paths may differ for the same target, or its files change."""
    if was["target_files"] == digest:
        return
    if was["target"] == target:
        raise ConfigError(f"{target} has changed since {root} was made with it: {WAYS_OUT}")
    raise ConfigError(
        f"{root} holds answers of target {was['target']!r}, not {target!r}: give the same target, "
        f"{WAYS_OUT}"
    )


def _check_unrecorded(root: Path, new: Origin) -> None:
    """Check data of an earlier version, which recorded no options, as far as possible."""
    for folder in all_folders(root):
        known = read_manifest(folder)
        for name in ("target", "seed"):
            if known and known.get(name) != new.options[name]:
                raise ConfigError(
                    f"{folder} holds answers of {name} {known.get(name)!r}, not "
                    f"{new.options[name]!r}: give the same {name}, {WAYS_OUT}"
                )
    shards = [read_shard(path) for folder in all_folders(root) for path in shard_files(folder)]
    longest = max(
        (int((s["lengths"] - s["prompt_lens"]).max(initial=0)) for s in shards), default=0
    )
    if longest > new.options["max_answer"]:
        raise ConfigError(
            f"{root} has an answer of {longest:,} tokens, which --max-answer "
            f"{new.options['max_answer']} does not allow: give the --max-answer that made it, "
            f"{WAYS_OUT}"
        )


def _only_adds_answers(was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether the new options keep all answers: --answers may change which are greedy."""
    if now["answers"] < was["answers"]:
        return False
    return min(1, was["greedy_share"] * was["answers"]) == min(
        1, now["greedy_share"] * now["answers"]
    )


def _refusal(root: Path, name: str, was: Any, now: Any) -> ConfigError:
    return ConfigError(
        f"{root} was made with {as_flag(name, was)}, and {as_flag(name, now)} would make other "
        f"data: {advise(name, was)}, {WAYS_OUT}"
    )


def _names(files: Iterable[Any]) -> str:
    return ", ".join(str(path) for path in files)


# ---- fingerprints ----


def hash_prompts(conversations: Iterable[Conversation]) -> np.ndarray:
    """Return the hashes of distinct prompts in ascending order: [prompts] uint64."""
    found = {
        int.from_bytes(hashlib.blake2b(json.dumps(each).encode(), digest_size=8).digest(), "little")
        for each in conversations
    }
    return np.array(sorted(found), dtype=np.uint64)


def digest_target(folder: Path) -> str:
    """Hash the target's configs and tokenizer fully, and its weights by samples."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".safetensors"):
            digest.update(f"{path.name}\n{path.stat().st_size}\n".encode())
            digest.update(_sample(path) if path.suffix == ".safetensors" else path.read_bytes())
    return digest.hexdigest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= BLOCKS * BLOCK_BYTES:
            return file.read()
        parts = []
        for place in np.linspace(0, size - BLOCK_BYTES, BLOCKS, dtype=np.int64).tolist():
            file.seek(place)
            parts.append(file.read(BLOCK_BYTES))
    return b"".join(parts)
