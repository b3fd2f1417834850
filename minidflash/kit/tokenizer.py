"""One byte-level BPE tokenizer for all four kinds of text, and the token streams of training.

`python -m minidflash.kit.tokenizer` trains it and writes it to `kit/weights/target/`. Digits stand
alone, so that 47 is always the tokens 4 and 7: sums can be learnt digit by digit. Every text comes
back from encode and decode unchanged. The wild third of its training text is the standard library
of the Python that runs; the shipped one was made with Python 3.11.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minidflash.kit.corpus import wild_files
from minidflash.kit.world import END, KINDS, Dice, check_split, document, documents

MASK = "<|mask|>"
END_ID, MASK_ID = 0, 1
SHIPPED = Path(__file__).parent / "weights" / "target"
SHARES = {"maths": 0.25, "code": 0.25, "chat": 0.15, "wild": 0.35}
CHUNK = 1600  # characters of one piece of wild text, roughly


def train_tokenizer(
    size: int = 1024, world_documents: int = 20_000, seed: int = 0
) -> PreTrainedTokenizerFast:
    """Train the tokenizer: two thirds of the characters from the world, one third wild.

    Args:
        size: entries of the vocabulary, the two special tokens and the 256 bytes included.
        world_documents: how many documents of the training split to read.
        seed: which documents.

    Raises:
        ValueError: when `size` cannot hold the special tokens and all bytes.
    """
    if size < 258:
        raise ValueError(f"size is {size}; allowed is 258 (256 bytes and 2 special tokens) or more")
    texts = [doc.text for doc in itertools.islice(documents("train", seed), world_documents)]
    room = sum(map(len, texts)) // 2
    pieces = [piece for _, piece in _wild_chunks("train", seed, 0)]
    for piece in pieces:
        if room <= 0:
            break
        texts.append(piece)
        room -= len(piece)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, MASK], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path | None = None) -> Any:
    """Load a tokenizer directory with transformers; the shipped one if no path is given."""
    return AutoTokenizer.from_pretrained(str(path or SHIPPED))


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, in the oldest spelling of the class."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def _wild_chunks(split: str, seed: int, epoch: int) -> list[tuple[str, str]]:
    """The files cut at line ends into pieces of about `CHUNK` characters, anew in every epoch."""
    dice = Dice(f"wild/{split}/{seed}/{epoch}")
    pieces = []
    for name, text in wild_files(split):
        size, piece = dice.number(0, CHUNK), ""
        for line in text.splitlines(keepends=True):
            piece += line
            size += len(line)
            if size >= CHUNK:
                pieces.append((name, piece))
                size, piece = 0, ""
        if piece.strip():
            pieces.append((name, piece))
    keys = [dice.random() for _ in pieces]
    return [pieces[i] for i in sorted(range(len(pieces)), key=keys.__getitem__)]


def texts(kind: str, split: str, seed: int) -> Iterator[str]:
    """Whole documents of a kind, or pieces of wild text, without end."""
    if kind == "wild":
        return (
            piece for epoch in itertools.count() for _, piece in _wild_chunks(split, seed, epoch)
        )
    return (document(kind, split, index, seed).text for index in itertools.count())


def token_stream(
    tokenizer: Any,
    split: str,
    seed: int = 0,
    count: int = 1_000_000,
    shares: Mapping[str, float | int] = SHARES,
) -> np.ndarray:
    """Return about `count` tokens of whole documents in random order, `<|endoftext|>` after each.

    Wild files are cut at line ends into pieces of about 1600 characters; a second pass over them
    cuts elsewhere.

    Args:
        tokenizer: what `load_tokenizer` returns.
        split: "train" or "held_out".
        seed: another seed, other documents.
        count: tokens wanted; the last document of each kind is kept whole, so there are a few more.
        shares: how much of each kind, by tokens; need not sum to 1.

    Returns:
        uint16 [T], T >= count.

    Raises:
        ValueError: for an unknown split or kind, a count below 1, a share below 0, or all shares 0.
    """
    check_split(split)
    if count < 1:
        raise ValueError(f"count is {count}; allowed is 1 or more")
    for kind, share in shares.items():
        if kind not in (*KINDS, "wild") or share < 0:
            raise ValueError(
                f"shares has {kind!r}: {share}; allowed are maths, code, chat and wild, 0 or more"
            )
    total, backend, parts = sum(shares.values()), tokenizer.backend_tokenizer, []
    if not total:
        raise ValueError(f"shares is {dict(shares)!r}; at least one must be above 0")
    for kind, share in shares.items():
        wanted, source = share / total * count, texts(kind, split, seed)
        while wanted > 0:
            size = min(4096, int(wanted / (500 if kind == "wild" else 90)) + 1)
            for encoding in backend.encode_batch_fast(list(itertools.islice(source, size))):
                if wanted > 0:
                    parts.append(np.array([*encoding.ids, END_ID], dtype=np.uint16))
                    wanted -= len(parts[-1])
    dice = Dice(f"order/{split}/{seed}")
    keys = [dice.random() for _ in parts]
    return np.concatenate([parts[i] for i in sorted(range(len(parts)), key=keys.__getitem__)])


def packed_rows(
    tokenizer: Any,
    split: str,
    seed: int = 0,
    rows: int = 1000,
    length: int = 256,
    shares: Mapping[str, float | int] = SHARES,
) -> np.ndarray:
    """Return `token_stream` in rows, uint16 [rows length]; a document may go on in the next."""
    return token_stream(tokenizer, split, seed, rows * length, shares)[: rows * length].reshape(
        rows, length
    )


def main() -> None:
    """Train the shipped tokenizer and write its directory."""
    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, SHIPPED)
    print(f"wrote {len(tokenizer)} entries to {SHIPPED}")


if __name__ == "__main__":
    main()
