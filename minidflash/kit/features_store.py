"""Target features on disk: computed once, read row by row while a drafter trains.

A row is one document: its ids, its loss mask (True where the target wrote the token) and the
features of its positions. Rows lie in shards, one safetensors file per so many rows, and each shard
appears whole or not at all, so that a run that is killed goes on at the next shard:

    features.json               what lies here: taps, precision, how many rows, whose documents
    shard-00000.safetensors     ids [T], loss_mask [T], features [T F], starts [n + 1]

T counts the positions of all n rows of a shard; row i is the slice starts[i] .. starts[i + 1].
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from minidflash.kit.store import save_file, write_atomically

PRECISIONS = {"bf16": torch.bfloat16, "f32": torch.float32}


class Row(NamedTuple):
    """One document, or several of one length side by side when the shapes begin with R."""

    ids: Int[Tensor, "*R S"]
    loss_mask: Bool[Tensor, "*R S"]
    features: Float[Tensor, "*R S F"]


@torch.no_grad()
def read_features(target: Any, ids: Int[Tensor, "R S"], taps: Sequence[int]) -> Tensor:
    """What the tapped layers say at every position, [R S F]: the online way, and the writer's."""
    return target.forward(ids, None, tuple(taps))[1]


def pad(rows: Sequence[Row]) -> Row:
    """Rows of any lengths as one batch, filled up on the right with zeros that carry no loss.

    What stands right of a document cannot reach it: the target is causal, and a block looks at
    positions before its anchor only.
    """
    sides = zip(*rows, strict=True)
    return Row(*(torch.nn.utils.rnn.pad_sequence(list(side), batch_first=True) for side in sides))


def fingerprint(documents: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> str:
    """A short name for exactly these documents, masks included."""
    digest = hashlib.sha256()
    for ids, mask in documents:
        digest.update(f"{list(map(int, ids))}{list(map(int, mask))}".encode())
    return digest.hexdigest()[:16]


def write_features(
    directory: Path | str,
    target: Any,
    documents: Sequence[tuple[Sequence[int], Sequence[bool]]],
    taps: Sequence[int],
    precision: str = "bf16",
    rows_per_shard: int = 64,
    quiet: bool = False,
) -> "FeatureStore":
    """Run the frozen target over every document (ids, loss mask) and keep what its taps say.

    Killed at any moment, the same call goes on at the first shard that is missing.

    Raises:
        ValueError: no documents, an empty one, a mask of another length, an unknown precision, or
            a directory that holds other documents, other taps or another target's features.
    """
    directory = Path(directory)
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {sorted(PRECISIONS)}")
    if rows_per_shard < 1 or not documents:
        raise ValueError(f"rows_per_shard={rows_per_shard} and documents={len(documents)}: both "
                         "must be at least 1")
    for i, (ids, mask) in enumerate(documents):
        if not 0 < len(ids) == len(mask):
            raise ValueError(f"document {i} has {len(ids)} ids and a loss mask of {len(mask)}")
    about = {"taps": list(taps), "precision": precision, "rows": len(documents),
             "rows_per_shard": rows_per_shard, "documents": fingerprint(documents)}
    listing = directory / "features.json"
    if listing.exists():
        found = json.loads(listing.read_text())
        for key, value in about.items():
            if found.get(key) != value:
                raise ValueError(f"{directory} holds features with {key}={found.get(key)!r}, "
                                 f"not {value!r}: choose another directory")
    else:
        write_atomically(listing, lambda path: path.write_text(json.dumps(about) + "\n"))
    store = FeatureStore(directory, complete=False)
    _refuse_another_target(store, target, documents)
    missing = [n for n in range(store.shards) if not store.path(n).exists()]
    for n in tqdm(missing, "features", disable=quiet or not missing, unit="shard"):
        part = documents[n * rows_per_shard : (n + 1) * rows_per_shard]
        features = [read_features(target, torch.tensor([list(ids)]), taps)[0] for ids, _ in part]
        lengths = torch.tensor([0] + [len(ids) for ids, _ in part])
        tensors = {
            "ids": torch.tensor([token for ids, _ in part for token in ids]),
            "loss_mask": torch.tensor([bool(flag) for _, mask in part for flag in mask]),
            "features": torch.cat(features).to("cpu", PRECISIONS[precision]),
            "starts": lengths.cumsum(0),
        }
        write_atomically(store.path(n), partial(save_file, tensors))
    return FeatureStore(directory)


def _refuse_another_target(store: "FeatureStore", target: Any, documents) -> None:
    """Compute one row that lies there again: another target would say something else."""
    first = next((n for n in range(store.shards) if store.path(n).exists()), None)
    if first is None:
        return
    row = store.row(first * store.rows_per_shard)
    again = read_features(target, row.ids[None], store.taps)[0].to(row.features)
    if row.features.shape != again.shape or not torch.allclose(row.features, again, 0.05, 0.05):
        raise ValueError(f"{store.directory} holds another target's features: "
                         "choose another directory")


class FeatureStore(Sequence[Row]):
    """Rows read one at a time: only the bytes of the row asked for leave the disk.

    Raises:
        ValueError: nothing was written here, or the writing was not finished.
    """

    def __init__(self, directory: Path | str, complete: bool = True):
        self.directory = Path(directory)
        listing = self.directory / "features.json"
        if not listing.exists():
            raise ValueError(f"{self.directory} has no features.json: nothing was written here")
        about = json.loads(listing.read_text())
        self.taps, self.precision = tuple(about["taps"]), about["precision"]
        self.rows, self.rows_per_shard = about["rows"], about["rows_per_shard"]
        self.shards = -(-self.rows // self.rows_per_shard)
        missing = sum(not self.path(n).exists() for n in range(self.shards))
        if complete and missing:
            raise ValueError(f"{missing} of {self.shards} shards are missing in {self.directory}: "
                             "call write_features again, it goes on where it stopped")

    def path(self, shard: int) -> Path:
        """Where a shard lies."""
        return self.directory / f"shard-{shard:05d}.safetensors"

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: Any) -> Any:
        """Row i, counted from the end when negative; a slice gives a list of rows."""
        if isinstance(i, slice):
            return [self.row(j) for j in range(self.rows)[i]]
        return self.row(range(self.rows)[i])

    def row(self, i: int) -> Row:
        """Row i: ids int64 [S], loss mask [S], features float32 [S F] whatever the precision."""
        shard, place = divmod(i, self.rows_per_shard)
        with safe_open(self.path(shard), "pt") as file:
            start, end = file.get_slice("starts")[place : place + 2].tolist()
            ids, mask, features = (file.get_slice(name)[start:end] for name in Row._fields)
        return Row(ids, mask, features.float())

    def batch(self, indices: Sequence[int]) -> Row:
        """Several rows, padded to the longest: ids [R S], loss mask [R S], features [R S F]."""
        return pad([self[i] for i in indices])
