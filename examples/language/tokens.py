"""Files of tokens, of any size: how ``convert`` writes them, and how a run maps them.

``books.tokens`` has the ids, uint16 or uint32, and ``books.tokens.json`` what they mean.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from examples.language.datamodule import TextDataModule
from samestep import ConfigError, RunError

PIECE, PIECES_AT_ONCE = 2**18, 8  # bytes that are tokenized together, on each core
SAVE_EVERY = 2**26  # bytes of text between two points where a conversion can resume


class Tokenizer:
    """From text to ids and back.

    Args:
        content: of a ``tokenizer.json``; None: the bytes of UTF-8, and 256 for the end of a file.
        end: token at the end of a file, if there is a ``content``.

    Raises:
        ConfigError: if the package ``tokenizers`` is missing, or cannot read the content.
    """

    first = 0  # the lowest id that may be sampled

    def __init__(self, content: str | None, end: str | None = None) -> None:
        self.content = content
        self.of_package: Any = None
        self.end: int | None = 256
        if content is None:
            return
        try:
            from tokenizers import Tokenizer as Package
        except ModuleNotFoundError:
            raise ConfigError(
                "The package tokenizers is not installed: .venv/bin/pip install tokenizers"
            ) from None
        try:
            self.of_package = Package.from_str(content)
        except Exception as error:  # the package raises nothing else
            raise ConfigError(f"tokenizer.json: cannot be read: {error}") from None
        self.end = self.of_package.token_to_id(end) if end else None
        if end and self.end is None:
            raise ConfigError(f"--end {end}: is no token of this tokenizer")

    def __len__(self) -> int:
        return int(self.of_package.get_vocab_size()) if self.of_package else 257

    def encode(self, text: str) -> Tensor:
        """Ids int64 ``[N]``."""
        return torch.tensor([*self.encode_all([text.encode()])[0]], dtype=torch.int64)

    def encode_all(self, texts: list[bytes]) -> list[Any]:
        """The ids of each text, in UTF-8."""
        lines = [text.decode() for text in texts]
        if not self.of_package:
            return [np.frombuffer(text, np.uint8) for text in texts]
        found = self.of_package.encode_batch(lines, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; invalid UTF-8 becomes the replacement character."""
        if self.of_package:
            return str(self.of_package.decode(list(ids)))
        return bytes(id for id in ids if id < 256).decode(errors="replace")


def read_tokenizer(file: Path | None, end: str | None) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``; without one, bytes. ``end``: see ``Tokenizer``."""
    if file is None and end:
        raise ConfigError("--end: needs --tokenizer; bytes have an id of their own for the end")
    try:
        return Tokenizer(file.read_text() if file else None, end)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tokenizer {file}: cannot be read: {error}") from None


class TokenDataModule(TextDataModule):
    """Tokens in a file that is mapped into memory, split by position into train, val and test.

    ``vocabulary_size`` must cover that of the file. See ``TextDataModule``.
    """

    kind_of_vocabulary = Tokenizer

    def read(self) -> tuple[Any, str]:
        """All tokens, and the checksum that was taken when they were written."""
        path = Path(str(self.file))
        try:
            facts = json.loads(Path(f"{path}.json").read_text())
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.file={path}: is no file of examples.language.convert: {error}"
            ) from None
        tokens = np.dtype(facts["dtype"])
        if size != facts["num_tokens"] * tokens.itemsize:
            raise ConfigError(
                f"data.file={path}: has {size} bytes, and {facts['num_tokens']} tokens are "
                f"{facts['num_tokens'] * tokens.itemsize}; copy or convert it again"
            )
        if self.vocabulary_size < facts["vocabulary_size"]:
            raise ConfigError(
                f"data.vocabulary_size={self.vocabulary_size}: {path} needs "
                f"{facts['vocabulary_size']}"
            )
        self.vocabulary = Tokenizer(facts["tokenizer"])
        return np.memmap(path, tokens, "r"), facts["sha256"]

    def encode(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Nothing to do: they are tokens."""
        return parts


def convert(
    source: Path, target: Path, tokenizer: Tokenizer, show: Callable[..., object]
) -> dict[str, Any]:
    """Write the tokens of a text, or of all ``*.txt`` below a folder, and return their facts.

    A conversion that was killed resumes where it stopped. The file appears when it is complete and
    was read back; an existing one is verified. ``show`` gets the bytes done and in all.

    Raises:
        ConfigError: if there is no text in UTF-8, or the target has other tokens.
        RunError: if the file differs from what was written.
    """
    files = sorted(source.rglob("*.txt")) if source.is_dir() else [source]
    if not files or not files[0].is_file():
        raise ConfigError(f"{source}: must be a text file, or a folder of *.txt")
    sizes = [file.stat().st_size for file in files]
    lines = [f"{file.name} {size}" for file, size in zip(files, sizes, strict=True)]
    words = [*lines, tokenizer.content or "", str(tokenizer.end)]
    origin = sha256("\n".join(words).encode()).hexdigest()
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    place, partial_file = Path(f"{target}.json"), Path(f"{target}.partial")
    written = target if target.exists() else partial_file
    done = read_facts(place, origin, target) if written.exists() else {}
    if not done:
        progress = Path(f"{target}.progress")
        done = read_facts(progress, origin, target) or {
            "origin": origin, "file": 0, "offset": 0, "num_tokens": 0, "crc": 0
        }  # fmt: skip
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_file.open("ab") as output:
            # Tokens after the last saved point may be half written.
            output.truncate(done["num_tokens"] * dtype.itemsize)
            for ids, at in encode_files(files, done, tokenizer):
                content = np.asarray(ids, dtype).tobytes()
                output.write(content)
                done["num_tokens"] += len(ids)
                done["crc"] = zlib.crc32(content, done["crc"])
                if at:
                    done |= at
                    save(output, progress, done)
                    now = sum(sizes[: done["file"]]) + done["offset"]
                    show(completed=now, total=sum(sizes))
            save(output, progress, done)
        done |= {
            "dtype": dtype.str, "vocabulary_size": len(tokenizer), "tokenizer": tokenizer.content
        }  # fmt: skip
    digest, crc = checksums(written)
    if crc != done["crc"] or digest != done.setdefault("sha256", digest):
        raise RunError(
            f"{written}: was read back different from what was written; the disk is faulty. "
            f"Remove {target}* and repeat the command"
        )
    if written == partial_file:
        write_whole(place, done)
        partial_file.replace(target)
    Path(f"{target}.progress").unlink(missing_ok=True)
    return done


def encode_files(
    files: list[Path], start: dict[str, int], tokenizer: Tokenizer
) -> Iterator[tuple[Any, dict[str, int] | None]]:
    """Ids, and every ``SAVE_EVERY`` bytes the place after them where a conversion can resume."""
    first, offset = start["file"], start["offset"]
    for number, file in enumerate(files[first:], first):
        with file.open("rb") as stream:
            saved = stream.seek(offset)
            offset = 0
            # Cut at ends of lines, wherever it resumes: the tokens do not depend on interruptions.
            pieces = iter(partial(stream.readlines, PIECE), [])
            while texts := [b"".join(lines) for lines in islice(pieces, PIECES_AT_ONCE)]:
                try:
                    found = tokenizer.encode_all(texts)
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{file}: must be text in UTF-8: {error}") from None
                for ids in found[:-1]:
                    yield ids, None
                is_due = stream.tell() - saved >= SAVE_EVERY
                saved = stream.tell() if is_due else saved
                yield found[-1], {"file": number, "offset": saved} if is_due else None
        end = [] if tokenizer.end is None else [tokenizer.end]
        yield end, {"file": number + 1, "offset": 0}


def read_facts(path: Path, origin: str, target: Path) -> dict[str, Any]:
    """The facts of a conversion with this origin; empty if there is none."""
    if not path.exists():
        return {}
    facts: dict[str, Any] = json.loads(path.read_text())
    if facts["origin"] != origin:
        raise ConfigError(
            f"{target}: has other texts or another tokenizer; name another target, or remove "
            f"{path.name}"
        )
    return facts


def save(output: BinaryIO, path: Path, facts: dict[str, Any]) -> None:
    """Record how far a conversion is, once its tokens are on the disk."""
    output.flush()
    os.fsync(output.fileno())
    write_whole(path, facts)


def write_whole(path: Path, facts: dict[str, Any]) -> None:
    """Replace a JSON file at once."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(facts))
    new.replace(path)


def checksums(path: Path) -> tuple[str, int]:
    """SHA-256 and CRC-32 of a file."""
    digest, crc = sha256(), 0
    with path.open("rb") as stream:
        while content := stream.read(2**20):
            digest.update(content)
            crc = zlib.crc32(content, crc)
    return digest.hexdigest(), crc
