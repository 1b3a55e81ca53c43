"""Files of tokens: converted, mapped into memory, and trained on."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.language import tokens
from examples.language.tokens import TokenDataModule, Tokenizer, convert
from samestep import ConfigError, RunError
from tests.conftest import ROOT, run

TEXTS = {"a.txt": "the quick brown fox\n" * 300, "b.txt": "Grüße ☃\r\n" * 200 + "no end of line"}


@pytest.fixture
def books(tmp_path: Path) -> Path:
    (tmp_path / "books/more").mkdir(parents=True)
    for name, text in zip(["books/a.txt", "books/more/b.txt"], TEXTS.values(), strict=True):
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path / "books"


def write(source: Path, target: Path, tokenizer: Tokenizer | None = None) -> dict:
    return convert(source, target, tokenizer or Tokenizer(None), lambda **_: None)


def data_of(file: Path, **options) -> TokenDataModule:
    defaults = {
        "val_share": 0.1, "test_share": 0.1, "vocabulary_size": 257, "context": 8, "stride": 8,
        "global_batch_size": 4, "eval_batch_size": 4, "seed": 0, "unit": "token",
    }  # fmt: skip
    return TokenDataModule(file=str(file), **(defaults | options))


def test_bytes_become_tokens_and_text_again(books: Path, tmp_path: Path):
    target = tmp_path / "data/books.tokens"  # a folder that is not there yet
    facts = write(books, target)
    ids = np.fromfile(target, "<u2")
    expected = [id for text in TEXTS.values() for id in [*text.encode(), 256]]
    assert ids.tolist() == expected
    assert facts == json.loads(Path(f"{target}.json").read_text())
    assert (facts["num_tokens"], facts["vocabulary_size"]) == (len(expected), 257)
    assert Tokenizer(None).decode(ids.tolist()) == "".join(TEXTS.values())
    assert Tokenizer(None).encode("ü").tolist() == [0xC3, 0xBC]
    assert sorted(p.name for p in target.parent.iterdir()) == [target.name, f"{target.name}.json"]


def test_a_stopped_conversion_resumes(books: Path, tmp_path: Path, monkeypatch):
    expected = write(books, tmp_path / "whole")
    monkeypatch.setattr(tokens, "PIECE", 100)
    monkeypatch.setattr(tokens, "SAVE_EVERY", 2000)
    encode, num_read = Tokenizer.encode_all, 0

    def encode_all(self: Tokenizer, texts: list[bytes]) -> list:
        nonlocal num_read
        num_read += sum(map(len, texts))
        if num_read > stop_at:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_all", encode_all)
    for limit in (3000, 4500, 9500):  # in a text, again, and in the next text
        stop_at = limit
        with pytest.raises(KeyboardInterrupt):
            write(books, tmp_path / "stopped")
        assert not (tmp_path / "stopped").exists()
    num_read, stop_at = 0, 10**9
    assert write(books, tmp_path / "stopped")["sha256"] == expected["sha256"]
    assert 0 < num_read < 5000, "of 8414 bytes"
    assert (tmp_path / "stopped").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.program
def test_what_is_wrong_with_texts_and_files_is_one_message(books: Path, tmp_path: Path):
    target = tmp_path / "books.tokens"
    write(books, target)
    write(books, target)  # verifies
    content = target.read_bytes()
    target.write_bytes(content[:100] + b"x" + content[101:])
    with pytest.raises(RunError, match=r"books\.tokens: was read back different"):
        write(books, target)
    target.write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=r"has \d+ bytes, and \d+ tokens are \d+; copy or"):
        data_of(target).setup("fit")
    target.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.vocabulary_size=256: .*books\.tokens needs 257"):
        data_of(target, vocabulary_size=256).setup("fit")
    with pytest.raises(ConfigError, match=r"a\.txt: is no file of examples\.language\.convert"):
        data_of(books / "a.txt").setup("fit")
    (books / "a.txt").write_text("other")
    with pytest.raises(ConfigError, match=r"has other texts or another tokenizer; name another"):
        write(books, target)
    (books / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: must be text in UTF-8"):
        write(books, tmp_path / "new")
    for words in (
        ["nowhere", "x"],
        [str(books), "x", "--end", "e"],
        [str(books), "x", "--to", "y"],
    ):
        done = run("-m", "examples.language.convert", *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_windows_are_those_of_the_file(books: Path, tmp_path: Path, monkeypatch):
    write(books, tmp_path / "small")
    monkeypatch.setattr(Tokenizer, "__len__", lambda _: 70_000)
    assert write(books, tmp_path / "large")["dtype"] == "<u4"
    ids = np.fromfile(tmp_path / "small", "<u2")
    for name in ("small", "large"):
        data = data_of(tmp_path / name, vocabulary_size=70_000)
        data.setup("fit")
        inputs, targets = data.train_set[torch.tensor([5, 0])]
        assert inputs.tolist() == [ids[40:48].tolist(), ids[:8].tolist()]
        assert targets.tolist() == [ids[41:49].tolist(), ids[1:9].tolist()]
        assert inputs.dtype == torch.int64
        test = torch.cat([targets[targets >= 0] for _, targets in data.test_dataloader()])
        assert test.tolist() == ids[-round(0.1 * len(ids)) + 1 :].tolist()


def test_windows_take_no_memory_of_the_process(tmp_path: Path):
    ids = np.random.default_rng(0).integers(256, size=50_000_000, dtype=np.uint16)  # 100 MB
    facts = {"dtype": "<u2", "vocabulary_size": 257, "tokenizer": None, "sha256": ""}
    most = []
    for share in (10, 1):
        ids[: len(ids) // share].tofile(tmp_path / "ids")
        num_tokens = len(ids) // share
        (tmp_path / "ids.json").write_text(json.dumps({**facts, "num_tokens": num_tokens}))
        data = data_of(tmp_path / "ids", context=1000, stride=1000, global_batch_size=100)
        data.setup("fit")
        resident = [anonymous_memory() for _ in data.train_dataloader()]
        assert len(resident) == 400 // share - 1
        most.append(max(resident))
    assert most[1] - most[0] < 40e6


def anonymous_memory() -> int:
    """Bytes of this process that the system cannot take back."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", text)[0])


def test_a_tokenizer_of_the_package(books: Path, tmp_path: Path):
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(TEXTS.values(), trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    target = tmp_path / "books.tokens"
    content = (tmp_path / "tokenizer.json").read_text()
    facts = write(books, target, Tokenizer(content, "<|endoftext|>"))
    assert facts["vocabulary_size"] == made.get_vocab_size()
    ids = np.fromfile(target, "<u2").tolist()
    assert ids.count(made.token_to_id("<|endoftext|>")) == 2
    assert len(ids) < 3000
    data = data_of(target, vocabulary_size=300)
    data.setup("fit")
    again = data_of(target, vocabulary_size=300)
    again.load_state_dict(data.state_dict())
    assert again.vocabulary.decode(ids) == "".join(TEXTS.values())
    assert again.vocabulary.decode(again.vocabulary.encode("quick ☃")) == "quick ☃"
    with pytest.raises(ConfigError, match=r"--end <x>: is no token of this tokenizer"):
        Tokenizer(content, "<x>")


@pytest.mark.program
def test_a_missing_package_is_one_message(books: Path, tmp_path: Path):
    (tmp_path / "tokenizers.py").write_text("raise ModuleNotFoundError('x', name='tokenizers')")
    (tmp_path / "tokenizer.json").write_text("{}")
    words = [str(books), str(tmp_path / "x"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    path = f"{tmp_path}:{ROOT}:{ROOT / 'src'}"
    done = run("-m", "examples.language.convert", *words, PYTHONPATH=path)
    assert done.returncode == 2
    message = "The package tokenizers is not installed: .venv/bin/pip install tokenizers"
    assert message in done.stderr
