"""Documents -> `train.bin`, `val.bin` (and `test.bin`), `tokenizer.json`, `manifest.json`: once, in constant memory."""

import hashlib
import heapq
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock
from huggingface_hub import hf_hub_download
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oelm.data.corpus import EOT, Corpus, Document, Split, open_corpus, stable_hash
from oelm.integrity import SEAL, file_sha256, read_object, remembered_sha256, seal_holds, sealed

FORMAT = 1
GPT2 = ("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e")
ENDS = (EOT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # the end-of-text token is the first of these found
LARGEST = 2**20  # tokens of a BPE that is trained here
BPE_SAMPLE = 2**25  # characters a BPE is trained on, at most
BATCH = 2**18  # characters a thread encodes at a time: many a call, yet few enough to share out evenly


class SplitFile(BaseModel, frozen=True, extra="forbid"):
    """What one `.bin` file holds; `bytes` is the length of its text in UTF-8, for bits per byte."""

    tokens: int
    documents: int
    bytes: int
    sha256: str


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """Which tokens these are and where they come from."""

    format: int
    corpus: str
    revision: str | None
    fingerprint: str
    val_fraction: float
    test_fraction: float | None = None
    tokenizer: str
    tokenizer_source: str
    tokenizer_sha256: str
    vocab_size: int
    eot: int
    dtype: Literal["uint16", "uint32"]
    splits: dict[Split, SplitFile]

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """The manifest of a prepared folder, checked against its seal and the sizes of its files."""
        try:
            facts = read_object(folder / "manifest.json")
            if SEAL in facts and not seal_holds(facts):  # old ones have none
                raise ValueError("manifest.json does not match its own checksum")
            manifest = cls.model_validate({key: value for key, value in facts.items() if key != SEAL})
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{folder}: no prepared corpus there; see oelm prepare") from None
        except ValidationError as error:
            raise ValueError(f"{folder}/manifest.json: damaged or too old; prepare again") from error
        except ValueError as error:
            raise ValueError(f"{folder}: {error}; prepare again") from None
        for name, split in manifest.splits.items():
            path = folder / f"{name}.bin"
            size = path.stat().st_size if path.exists() else 0
            if size != split.tokens * np.dtype(manifest.dtype).itemsize:
                raise ValueError(f"{path}: {size} bytes are not its {split.tokens} tokens; prepare again")
        return manifest

    def check(self, folder: Path, split: Split) -> str:
        """The checksum of a split's file as it is now; raises unless it is the manifest's."""
        path = folder / f"{split}.bin"
        if (found := remembered_sha256(path)) != self.splits[split].sha256:
            raise ValueError(f"{path}: does not match its checksum; it is damaged: delete the folder, prepare again")
        return found


def prepare(
    corpus: str,
    tokenizer: str,
    folder: Path,
    *,
    revision: str | None = None,
    val_fraction: float = 0.01,
    test_fraction: float | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Manifest:
    """Tokenises a corpus into `folder`; does nothing when the folder already holds exactly that."""
    source = open_corpus(corpus, revision=revision, val_fraction=val_fraction, test_fraction=test_fraction)
    if source.tokenizer not in (None, tokenizer):
        raise ValueError(
            f"data.tokenizer={tokenizer}: {corpus} needs one token per symbol; set data.tokenizer={source.tokenizer}"
        )
    wanted: dict[str, Any] = {"format": FORMAT, "val_fraction": val_fraction, "test_fraction": test_fraction}
    wanted |= {"fingerprint": source.fingerprint, "tokenizer_source": _tokenizer_source(tokenizer)}
    if found := _ready(folder, wanted):  # asked before locking: the folder may be read-only
        return found
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    partial = folder / ".partial"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if found := _ready(folder, wanted):  # another process prepared it while this one waited
                return found
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            partial.mkdir()
            try:
                coder = load_tokenizer(tokenizer, source)
                text = coder.to_str(pretty=True).encode()
                (partial / "tokenizer.json").write_bytes(text)
                facts = _encode(source, coder, partial, workers or cores, progress)
                wanted |= {"corpus": corpus, "revision": source.revision, "tokenizer": tokenizer}
                manifest = Manifest(**wanted, **facts, tokenizer_sha256=hashlib.sha256(text).hexdigest())
                text = json.dumps(sealed(manifest.model_dump(mode="json")), indent=2).encode()
                (partial / "manifest.json").write_bytes(text + b"\n")
                (folder / "manifest.json").unlink(missing_ok=True)  # it never stands beside files of another
                for name in (*(f"{split}.bin" for split in source.splits), "tokenizer.json", "manifest.json"):
                    os.replace(partial / name, folder / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _ready(folder: Path, wanted: dict[str, Any]) -> Manifest | None:
    with suppress(FileNotFoundError, ValueError):
        found = Manifest.load(folder)
        for split in found.splits:
            found.check(folder, split)
        coder = file_sha256(folder / "tokenizer.json")
        return found if wanted.items() <= dict(found).items() and coder == found.tokenizer_sha256 else None
    return None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """One line for a full disk or a folder that cannot be written; errors of the source's files pass."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename and not Path(error.filename).is_relative_to(folder)):
            raise
        raise ValueError(f"{folder}: {error.strerror}; free space or choose another folder") from error


def _encode(source: Corpus, coder: Tokenizer, folder: Path, workers: int, progress: bool) -> dict[str, Any]:
    """Writes the `.bin` files: threads encode (without the GIL) while this one reads ahead and writes."""
    vocab_size, eot = max(coder.get_vocab().values()) + 1, _end_of_text(coder)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    end = np.array([eot], dtype)
    coder.encode_special_tokens = True  # a text that spells a special token must not end its document
    facts: dict[str, Counter[str]] = {split: Counter() for split in source.splits}
    digests = {split: hashlib.sha256() for split in facts}
    pending: deque[Future[list[tuple[Document, NDArray[Any]]]]] = deque()

    def encode(batch: list[Document]) -> list[tuple[Document, NDArray[Any]]]:
        encodings = coder.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        # fromiter is the quickest way out of the list that `ids` builds
        return [(d, np.fromiter(e.ids, dtype, len(e))) for d, e in zip(batch, encodings, strict=True)]

    def write(encoded: list[tuple[Document, NDArray[Any]]]) -> None:
        for split, fact in facts.items():
            mine = [(document, ids) for document, ids in encoded if document.split == split]
            tokens = np.concatenate([part for _, ids in mine for part in (ids, end)] or [end[:0]])
            files[split].write(tokens.data)
            digests[split].update(tokens.data)
            size = sum(len(document.text.encode()) for document, _ in mine)
            fact.update(tokens=len(tokens), documents=len(mine), bytes=size)
        report(encoded[-1][0].done, sum(fact["tokens"] for fact in facts.values()))

    with ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in facts}
        report = stack.enter_context(_reporter(progress))
        stack.enter_context(_one_thread_a_call())
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        for batch in _batches(source.documents()):
            pending.append(pool.submit(encode, batch))
            if len(pending) > 2 * workers:
                write(pending.popleft().result())
        while pending:
            write(pending.popleft().result())
    splits = {split: {**fact, "sha256": digests[split].hexdigest()} for split, fact in facts.items()}
    return {"vocab_size": vocab_size, "eot": eot, "dtype": dtype, "splits": splits}


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Our threads already fill the cores; the tokenizer's own pool would make them queue for each other."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@contextmanager
def _reporter(progress: bool) -> Iterator[Callable[[float, int], None]]:
    """Gives `report(share done, tokens)`: a bar on a terminal, else a line every ten seconds."""
    start, last = time.monotonic(), 0.0
    speed = TextColumn("prepare: {task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s")
    columns = (speed, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("", total=1.0, tokens=0, rate=0.0)

        def report(done: float, tokens: int) -> None:
            nonlocal last
            spent = time.monotonic() - start
            bar.update(task, completed=done, tokens=tokens, rate=tokens / spent)
            if progress and bar.disable and spent - last > 10:
                last = spent
                left = f", {spent / done - spent:.0f} s left" if done else ""
                console.print(f"prepare: {done:.0%}, {tokens:,} tokens, {tokens / spent:,.0f}/s{left}")

        yield report


def _tokenizer_source(spec: str) -> str:
    """What decides the tokenizer, found without loading it: a re-run must not need the hub."""
    if spec == "gpt2":
        return f"hub:{GPT2[0]}@{GPT2[1]}"
    if spec == "bytes" or spec.startswith("bpe:"):
        return spec
    return hashlib.sha256(b"".join(path.read_bytes() for path in _tokenizer_files(spec))).hexdigest()


def _tokenizer_files(spec: str) -> list[Path]:
    if spec == "gpt2":
        try:
            return [Path(hf_hub_download(GPT2[0], "tokenizer.json", revision=GPT2[1]))]
        except OSError as error:
            hint = "pass a folder with its vocab.json and merges.txt: data.tokenizer=gpt2:path/to/folder"
            raise ValueError(f"data.tokenizer=gpt2: the Hugging Face hub is out of reach; {hint}") from error
    path = Path(spec.removeprefix("gpt2:")).expanduser()
    if path.is_file():
        return [path]
    for names in (["tokenizer.json"], ["vocab.json", "merges.txt"], ["encoder.json", "vocab.bpe"]):
        if all((path / name).is_file() for name in names):
            return [path / name for name in names]
    holds = "tokenizer.json (or vocab.json and merges.txt, or encoder.json and vocab.bpe)"
    raise FileNotFoundError(f"data.tokenizer={spec}: not gpt2, bytes or bpe:<size>, and no path to {holds}")


def load_tokenizer(spec: str, corpus: Corpus) -> Tokenizer:
    """The tokenizer `bytes`, `bpe:<size>` (trained on the corpus), `gpt2`, `gpt2:<path>` or `<path>`."""
    if spec == "bytes" or spec.startswith("bpe:"):
        size = 257 if spec == "bytes" else int(spec[4:]) if spec[4:].isdecimal() else 0
        if not 257 <= size <= LARGEST:
            raise ValueError(f"data.tokenizer={spec}: a size from 257 (256 bytes and end-of-text) to {LARGEST:,}")
        coder, alphabet = _byte_level(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOT], initial_alphabet=alphabet)
        trainer.show_progress = False
        coder.train_from_iterator(_sample(corpus) if size > 257 else [], trainer)
        return coder
    files = [str(path) for path in _tokenizer_files(spec)]
    try:
        coder = Tokenizer.from_file(*files) if len(files) == 1 else _byte_level(models.BPE.from_file(*files))
    except Exception as error:  # the only type its Rust side raises
        raise ValueError(f"data.tokenizer={spec}: cannot read {files[0]} ({error})") from error
    coder.no_padding()
    coder.no_truncation()
    if spec.startswith("gpt2") and coder.get_vocab_size() != 50257:
        raise ValueError(f"data.tokenizer={spec}: {coder.get_vocab_size()} tokens, where GPT-2 has 50257")
    return coder


def _end_of_text(coder: Tokenizer) -> int:
    found = [i for i in map(coder.token_to_id, ENDS) if i is not None]
    if not found:
        raise ValueError(f"data.tokenizer: it has no end-of-text token ({', '.join(ENDS)})")
    return int(found[0])


def _byte_level(model: models.BPE) -> Tokenizer:
    coder = Tokenizer(model)
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    coder.add_special_tokens([EOT])
    return coder


def _sample(corpus: Corpus) -> list[str]:
    """Training documents of the lowest hashes: even over the corpus, always the same, of bounded size."""
    kept: list[tuple[int, str]] = []
    size = 0
    for index, document in enumerate(corpus.documents()):
        if document.split == "train":
            heapq.heappush(kept, (-stable_hash(index), document.text))
            size += len(document.text)
            while size > BPE_SAMPLE and len(kept) > 1:
                size -= len(heapq.heappop(kept)[1])
    return [text for _, text in kept]
