"""A drafter for vLLM: the format of the speculators project, written, and read back.

    python -m minidflash export DIR --format speculators --verifier Qwen/Qwen3-4B

The tensors and their names are z-lab's; only config.json differs:

    z-lab                                speculators
    sizes beside everything else         in transformer_layer_config
    dflash_config.target_layer_ids: t    aux_hidden_state_layer_ids: t + 1, entries of
                                         transformers' hidden_states; entry 0 is the embedding
    dflash_config.mask_token_id          mask_token_id
    (nothing)                            speculators_config: how many tokens to propose, for whom

What the format cannot say, or says in another sense, is refused: a tap at the target's last layer
(the server reads what *enters* a layer), sliding layers (the window is counted from the anchor
there, from each slot in z-lab's), scales, caps, and causal layers.

Tried once, by hand: speculators 0.9.0 reads such a config.json and builds its own model, which
takes every tensor of the file and lacks only those that it copies from the target. Not tried: a
server.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit import checkpoint
from minidflash.kit.published import PublishedConfig

VERSION = "0.9.0"  # of speculators, whose reading code this was written after
# Copies of the target's own tensors that older files hold; with one vocabulary they are not needed.
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight",
            "verifier_norm.weight")
TOP = frozenset(
    "architectures speculators_model_type speculators_version speculators_config block_size"
    " transformer_layer_config draft_vocab_size target_hidden_size aux_hidden_state_layer_ids"
    " mask_token_id num_target_layers dtype torch_dtype transformers_version".split()
)
ONLY: dict[str, tuple[Any, ...]] = {  # keys that change what is computed, unless they say this
    "sample_from_anchor": (False,),
    "sliding_window_non_causal": (False,),
    "tie_word_embeddings": (False, True, None),  # the drafter has neither table nor head
}


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return "speculators_model_type" in raw


def config_for(
    c: DrafterConfig, verifier: str | None, dtype: torch.dtype = torch.bfloat16,
    max_position_embeddings: int = 32768, architectures: tuple[str, ...] = ("Qwen3ForCausalLM",),
) -> dict[str, Any]:
    """The config.json of this format for a drafter.

    Raises:
        ValueError: the format cannot say it.
    """
    if isinstance(c, PublishedConfig):
        raise ValueError("this drafter has windows, causal layers, scales or caps, which the"
                         " speculators format has no place for or counts otherwise")
    last = c.num_target_layers - 1
    if last in c.target_layer_ids:
        raise ValueError(f"target_layer_ids={list(c.target_layer_ids)}: layer {last} is the"
                         " target's last, whose output the speculators format cannot name")
    wide = checkpoint.zlab_config(c, dtype, max_position_embeddings)
    inner = {k: v for k, v in wide.items() if k not in (
        "architectures", "block_size", "dflash_config", "num_target_layers")}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            # The anchor takes one of the B slots.
            "proposal_methods": [{"proposal_type": "greedy", "accept_tolerance": 0.0,
                                  "speculative_tokens": c.block_size - 1, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": inner,
        "block_size": c.block_size,
        "draft_vocab_size": c.vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "mask_token_id": c.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in c.target_layer_ids],
        # Not theirs; they pass it over, and it makes the way back exact.
        "num_target_layers": c.num_target_layers,
        "dtype": str(dtype).removeprefix("torch."),
    }


def zlab_from(raw: Mapping[str, Any], num_target_layers: int | None = None) -> dict[str, Any]:
    """z-lab's config.json out of this format's.

    Args:
        raw: the content of config.json.
        num_target_layers: of the target, if the file does not say it.

    Raises:
        ValueError: it is no DFlash drafter, or one that is not computed here.
    """
    if raw.get("speculators_model_type") != "dflash":
        raise ValueError(f"speculators_model_type={raw.get('speculators_model_type')!r} is not"
                         " supported: only 'dflash'")
    if unknown := sorted(raw.keys() - TOP - ONLY.keys()):
        raise ValueError(f"{', '.join(unknown)} is unknown: it may change the numbers")
    for name, allowed in ONLY.items():
        if name in raw and raw[name] not in allowed:
            raise ValueError(f"{name}={raw[name]!r} is not supported: only {allowed[0]!r}")
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError("transformer_layer_config is missing")
    for name in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids"):
        if raw.get(name) is None:
            raise ValueError(f"{name} is missing")
    kinds = set(inner.get("layer_types") or []) - {"full_attention"}
    if kinds or inner.get("use_sliding_window"):
        raise ValueError("transformer_layer_config has sliding layers, whose window is counted from"
                         " the anchor in this format: not supported")
    layers = raw.get("num_target_layers", num_target_layers)
    if layers is None:
        raise ValueError("num_target_layers is not in this format: say how many layers the target"
                         " has (num_target_layers=...)")
    for name, twin in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if raw.get(name) not in (None, inner.get(twin)):
            raise ValueError(f"{name}={raw[name]} must equal {twin}={inner.get(twin)}: a vocabulary"
                             " or a width of its own is not supported")
    return {**inner, "architectures": ["DFlashDraftModel"], "num_target_layers": layers,
            "block_size": raw["block_size"], "dflash_config": {
                "mask_token_id": raw["mask_token_id"],
                "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]]}}


def save(
    model: DraftModel, folder: Path | str, verifier: str | None,
    dtype: torch.dtype | str = "bfloat16", **more: Any,
) -> None:
    """Write a drafter in this format; `more` is `config_for`'s.

    Raises:
        ValueError: the format cannot say it, or a weight is not finite in `dtype`.
    """
    folder, kept = Path(folder), checkpoint.dtype_named(dtype)
    raw = config_for(model.config, verifier, kept, **more)
    checkpoint.write_tensors(model, folder, kept)
    checkpoint.write_json(folder / checkpoint.CONFIG, raw)


def export(args: Any) -> int:
    """`python -m minidflash export`: a drafter's folder in the other format."""
    source = Path(args.directory)
    out = Path(args.out) if args.out else source.with_name(f"{source.name}-{args.format}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: name another folder with --out")
    raw = checkpoint.read_json(source / checkpoint.CONFIG)
    inner = raw.get("transformer_layer_config") or raw
    dtype = args.dtype or inner.get("dtype") or raw.get("dtype") or "bfloat16"
    reach = {"max_position_embeddings": inner.get("max_position_embeddings", 32768)}
    model = checkpoint.load_drafter(source, dtype, num_target_layers=args.target_layers)
    if args.format == "speculators":
        if args.verifier is None:
            raise ValueError("--verifier is missing: the hub id or folder of the target that this"
                             " drafter was made for, which the server loads by this name")
        save(model, out, args.verifier, dtype, **reach)
    else:
        checkpoint.save_drafter(model, out, dtype, **reach)
    print(f"{out}: {args.format} format, {dtype}")
    return 0


def arguments(parser: Any) -> None:
    """The options of `python -m minidflash export`."""
    parser.add_argument("directory", help="a drafter's folder, in either format")
    parser.add_argument("--format", required=True, choices=("zlab", "speculators"))
    parser.add_argument("--out", metavar="DIR", help="where to; beside it if not given")
    parser.add_argument("--verifier", metavar="NAME", help="the target's hub id or folder")
    parser.add_argument("--target-layers", type=int, metavar="N",
                        help="layers of the target, where the file does not say it")
    parser.add_argument("--dtype", help="how to store numbers; as they are if not given")
