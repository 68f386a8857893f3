"""Which weights a model directory holds: what its name, which is whatever the operator typed, does not say."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def fingerprint(model: str, revision: str = "") -> str:
    """A digest of the checkpoint at ``model``, a directory or a model of the Hugging Face cache; empty if unknown.

    Reads ``config.json``, the names and sizes of the weight files and 256 samples of 4 KiB from all over them: enough
    to tell a fine-tune, which differs everywhere, from its base, and at most a second or two on a network file system.
    """
    directory = _directory(model, revision)
    if directory is None:
        return ""
    digest = hashlib.sha256()
    try:
        files = sorted(entry for entry in directory.iterdir() if entry.suffix in WEIGHTS and entry.is_file())
        config = directory / "config.json"
        if config.is_file():
            digest.update(config.read_bytes())
        pieces = max(1, _SAMPLES // max(1, len(files)))
        for file in files:
            size = file.stat().st_size
            digest.update(f"\0{file.name}\0{size}\0".encode())
            with open(file, "rb", buffering=0) as content:
                for piece in range(pieces):
                    digest.update(os.pread(content.fileno(), _SAMPLE_BYTES, size * (2 * piece + 1) // (2 * pieces)))
    except OSError:
        return ""
    return digest.hexdigest()[:16]


def of_file(path: str) -> str:
    """A digest of a small file's content; the path itself where it cannot be read."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return path


def _directory(model: str, revision: str) -> Path | None:
    if not model:
        return None
    if Path(model).is_dir():
        return Path(model)
    try:
        # SGLang brings it, this package does not.
        from huggingface_hub import (  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
            try_to_load_from_cache,
        )
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except ValueError:
        return None  # neither a directory nor a name on the hub
    return Path(config).parent if isinstance(config, str) else None
