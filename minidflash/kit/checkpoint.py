"""Models on disk, in the formats that others read: transformers' for targets, z-lab's for drafters.

Both are a folder with `config.json` and `model.safetensors`, never pickle. Reading is strict: a key
or a tensor that is missing, unknown, misshapen, contradicting or not finite is refused by its name,
because a drafter that is nearly right does not fail, it only accepts less. Writing is atomic, and
`config.json` comes last, so a folder without it is not a model yet.

A target  Qwen3 as transformers writes it, in one file or in shards with an index.
A drafter eleven tensors per layer, and `fc.weight`, `hidden_norm.weight`, `norm.weight`. It has no
          embedding and no head: those are the target's.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from minidflash.attention import LayerConfig
from minidflash.cache import CachedQwen3
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit.published import SCALES, PublishedConfig, PublishedModel
from minidflash.kit.store import save_file, write_atomically
from minidflash.qwen3 import Qwen3, Qwen3Config, read_rope_theta, refuse_unsupported

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SIZES = tuple(f.name for f in fields(LayerConfig) if f.name not in ("rope_theta",))
DRAFTER_OWN = ("block_size", "mask_token_id", "target_layer_ids")  # in dflash_config or beside it

# Keys of a drafter's config.json that change nothing here, whatever they say.
NEUTRAL = frozenset(
    "_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range"
    " max_position_embeddings max_window_layers model_type pad_token_id sliding_window"
    " tie_word_embeddings torch_dtype transformers_version use_cache layer_types use_sliding_window"
    " hidden_act rope_theta rope_scaling rope_parameters is_causal".split()
)
# Keys that change something which is not computed here, unless they say this.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "sample_from_anchor": (False, None),
    "logit_scale": (1, None),
    "embedding_scale": (1, None),
}
# DFlash 2 has further weights, and picks among candidates one by one.
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def dtype_named(name: str | torch.dtype) -> torch.dtype:
    """A number format by name: float32, float16, bfloat16 or float64.

    >>> dtype_named("bfloat16")
    torch.bfloat16

    Raises:
        ValueError: it is none of them.
    """
    found = name if isinstance(name, torch.dtype) else DTYPES.get(name)
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype={name!r} is not supported: one of {', '.join(DTYPES)}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        ValueError: the file is missing, is no JSON, or holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path.parent} is no model folder: {path.name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return raw


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, all of it or nothing."""
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


# --------------------------------------------------------------------------------------------------
# tensors


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file it lies in, for one file or for shards with an index.

    Raises:
        ValueError: there are no weights, or the index names a shard that is missing.
    """
    if (folder / INDEX).exists():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map")
        files = {str(f) for f in places.values()}
        if odd := sorted(f for f in files if not f.endswith(".safetensors") or Path(f).name != f):
            raise ValueError(f"{folder / INDEX} names {odd[0]!r}, which is no file of this folder")
        if gone := sorted(f for f in files if not (folder / f).exists()):
            raise ValueError(f"{folder} lacks the shard {gone[0]} that its index names")
        return {name: folder / file for name, file in places.items()}
    if not (folder / WEIGHTS).exists():
        raise ValueError(f"{folder} has no {WEIGHTS} (and no {INDEX})")
    with _opened(folder / WEIGHTS) as file:
        return {name: folder / WEIGHTS for name in file.keys()}


def _opened(path: Path, device: str = "cpu") -> Any:
    try:
        return safe_open(path, "pt", device=device)
    except Exception as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def fill(
    build: Callable[[], nn.Module], folder: Path, dtype: torch.dtype, device: str,
    tied: bool = False, pass_over: Iterable[str] = (), depth: int = 0,
) -> Any:
    """Build a module without memory, then give it the folder's tensors, one at a time.

    No second copy of the weights is ever held. `tied` says that `lm_head.weight` is the embedding,
    whether or not the file holds it once more. `pass_over` names tensors that are not this model's.
    `depth` is how many layers `build` will make: a file with fewer tensors is refused before that.

    Raises:
        ValueError: the device cannot be used, no such model can be built, or tensors are missing,
            unknown, misshapen or not finite.
    """
    if depth > len(tensor_files(folder)):
        raise ValueError(f"{folder / CONFIG}: num_hidden_layers={depth} is more than there are"
                         f" tensors ({len(tensor_files(folder))})")
    try:
        with torch.device("meta"):
            model = build()
    except RuntimeError as error:  # sizes whose product no number holds
        raise ValueError(f"{folder / CONFIG}: no model has these sizes: {error}") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
        raise ValueError(f"device={str(device)!r} cannot be used here: {why}") from None
    wanted = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    places = {k: v for k, v in tensor_files(folder).items() if k not in set(pass_over)}
    twin = ("lm_head.weight", "model.embed_tokens.weight")
    if tied:
        wanted.pop(twin[0])
    if missing := sorted(wanted.keys() - places.keys()):
        raise ValueError(f"{folder} lacks {_some(missing)}")
    if unknown := sorted(places.keys() - wanted.keys() - ({twin[0]} if tied else set())):
        raise ValueError(f"{folder} holds {_some(unknown)}, which this model has no place for")
    loaded: dict[str, Tensor] = {}
    for path in sorted(set(places.values())):
        with _opened(path, device) as file:
            here = set(file.keys())
            for name in sorted(n for n, p in places.items() if p == path):
                if name not in here:
                    raise ValueError(f"{path} lacks {name}, which the index promises")
                raw = file.get_tensor(name)
                shape = wanted.get(name, wanted.get(twin[1]))
                if tuple(raw.shape) != shape:
                    raise ValueError(f"{folder}: {name} is {tuple(raw.shape)}, must be {shape}")
                if not raw.is_floating_point():
                    raise ValueError(f"{folder}: {name} is {raw.dtype}: quantised weights"
                                     " are not supported")
                loaded[name] = raw.to(dtype)
                if not loaded[name].isfinite().all():
                    late = " as " + str(dtype) if raw.isfinite().all() else ""
                    raise ValueError(f"{folder}: {name} is not finite{late}")
    if tied and not torch.equal(loaded.setdefault(twin[0], loaded[twin[1]]), loaded[twin[1]]):
        raise ValueError(f"{folder}: tie_word_embeddings is true, but {twin[0]} is another tensor")
    model.load_state_dict(loaded, assign=True)
    if tied:
        model.get_submodule("lm_head").weight = model.get_parameter(twin[1])
    return model.eval().requires_grad_(False)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_tensors(
    model: nn.Module, folder: Path, dtype: torch.dtype, leave_out: Iterable[str] = (),
    shard_bytes: int | None = None,
) -> None:
    """Write a module's tensors as safetensors, in shards if asked.

    Raises:
        ValueError: one is not finite in `dtype`.
    """
    tensors = {k: v.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format)
               for k, v in model.state_dict().items() if k not in leave_out}
    if bad := [k for k, v in tensors.items() if not v.isfinite().all()]:
        raise ValueError(f"{_some(bad)} is not finite in {dtype}: not written")
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        held = sum(t.nbytes for t in shards[-1].values())
        if shard_bytes is not None and held and held + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    names = [WEIGHTS] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    # All bytes first, beside the old ones: a full disk, or Ctrl-C, leaves the old model as it was.
    folder.mkdir(parents=True, exist_ok=True)
    kept = [*names, *([INDEX] if len(shards) > 1 else [])]
    parts = [folder / f"{name}.part" for name in kept]
    try:
        for part, shard in zip(parts, shards, strict=False):
            save_file(shard, part, metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(t.nbytes for t in tensors.values())
            places = {name: f for f, shard in zip(names, shards, strict=True) for name in shard}
            about = {"metadata": {"total_size": total}, "weight_map": places}
            parts[-1].write_text(json.dumps(about, indent=2) + "\n")
        for part in parts:
            with part.open("rb+") as written:
                os.fsync(written.fileno())
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    # From here until the new config.json the folder holds no model.
    (folder / CONFIG).unlink(missing_ok=True)
    for part, name in zip(parts, kept, strict=True):
        os.replace(part, folder / name)
    # What an earlier model left behind would be read instead of, or beside, the new one.
    stale = {WEIGHTS, INDEX, *(p.name for p in folder.glob("model-*-of-*.safetensors*"))}
    for file in stale - set(kept):
        (folder / file).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# targets


def save_target(
    target: Qwen3, folder: Path | str, stop_ids: Iterable[int] = (0,),
    dtype: torch.dtype | str = "bfloat16", shard_bytes: int | None = None,
) -> None:
    """Write a target so that `AutoModelForCausalLM.from_pretrained` loads it.

    Args:
        target: any Qwen3 of room 02 or 04.
        folder: is made if needed; a tokenizer that lies there stays.
        stop_ids: the tokens that end a text, kept in both configuration files; 0 is the shipped
            tokenizer's.
        dtype: how numbers are stored: 2 bytes each unless float32 is asked for.
        shard_bytes: start another file when one would grow past this.

    Raises:
        ValueError: a weight is not finite in `dtype`.
    """
    folder, kept, c = Path(folder), dtype_named(dtype), target.config
    stops = list(stop_ids)
    eos: Any = stops[0] if len(stops) == 1 else stops or None
    tied = ("lm_head.weight",) if c.tie_word_embeddings else ()
    write_tensors(target, folder, kept, tied, shard_bytes)
    write_json(folder / "generation_config.json", {"eos_token_id": eos, "do_sample": False})
    write_json(folder / CONFIG, target_config(c, kept) | {"eos_token_id": eos})


def target_config(c: Qwen3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a target, as transformers spells it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_layer_keys(c, dtype),
        "num_hidden_layers": c.num_hidden_layers,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
    }


def _layer_keys(c: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What every Qwen3-shaped config.json says; the rotary base in the old and the new spelling."""
    return {
        **{name: getattr(c, name) for name in SIZES},
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "use_sliding_window": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def load_target(
    folder: Path | str, dtype: torch.dtype | str = "float32", device: str = "cpu"
) -> CachedQwen3:
    """Read a Qwen3 target, frozen.

    Args:
        folder: as transformers writes it.
        dtype: what to compute in, whatever is stored.
        device: where to.

    Raises:
        ValueError: the folder holds no complete Qwen3, or one that room 02 does not compute.
    """
    folder, raw = Path(folder), read_json(Path(folder) / CONFIG)
    with _blame(folder):
        check_types(raw)
        check_rotary(raw)
        config = Qwen3Config.from_hf(raw)
        check_layer_types(raw)
    return fill(lambda: CachedQwen3(config), folder, dtype_named(dtype), device,
                config.tie_word_embeddings, depth=config.num_hidden_layers)


def read_stop_ids(folder: Path | str) -> tuple[int, ...]:
    """The tokens that end a text: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", CONFIG):
        if (Path(folder) / name).exists():
            found = read_json(Path(folder) / name).get("eos_token_id")
            ids = found if isinstance(found, list) else [] if found is None else [found]
            if odd := [x for x in ids if type(x) is not int or x < 0]:
                raise ValueError(f"{Path(folder) / name}: eos_token_id holds {odd[0]!r},"
                                 " which is no token id")
            if found is not None:
                return tuple(ids)
    return ()


class _blame:
    """Puts the folder in front of a message about its configuration."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, ValueError | TypeError):
            why = "a value has the wrong type: " if isinstance(error, TypeError) else ""
            raise ValueError(f"{self.folder / CONFIG}: {why}{error}") from None


WHOLE = (*(name for name in SIZES if name not in ("rms_norm_eps", "attention_bias")),
         "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_target_layers",
         "block_size")
REAL = ("rms_norm_eps", "rope_theta")


def check_types(raw: Mapping[str, Any]) -> None:
    """Refuse a value of another type, or of a size that nothing has, before anything is built.

    Raises:
        ValueError: there is one; its key is named.
    """
    nested = raw.get("rope_parameters")
    for name, kind in (("rope_parameters", dict), ("rope_scaling", dict), ("layer_types", list),
                       ("dflash_config", dict), ("tie_word_embeddings", bool),
                       ("attention_bias", bool), ("architectures", list)):
        if not isinstance(raw.get(name), kind | None):
            raise ValueError(f"{name}={raw[name]!r} has the wrong type: {kind.__name__} is due")
    for place in (raw, raw.get("dflash_config") or {}, nested or {}):
        for name in {*WHOLE, "mask_token_id"} & place.keys():
            value, least = place[name], int(name != "mask_token_id")
            if value is not None and not (type(value) is int and least <= value < 2**31):
                raise ValueError(f"{name}={value!r} has the wrong type or size:"
                                 f" a whole number, {least} or more, is due")
        for name in set(REAL) & place.keys():
            value = place[name]
            if value is not None and not (type(value) in (int, float) and 0 < value < 1e30):
                raise ValueError(f"{name}={value!r} must be above 0 and finite")
        taps = place.get("target_layer_ids") or []
        if not isinstance(taps, list) or any(type(tap) is not int for tap in taps):
            raise ValueError(f"target_layer_ids={taps!r} has the wrong type: a list of layers")


def check_rotary(raw: Mapping[str, Any]) -> None:
    """Refuse two rotary bases that contradict each other, or settings that are not computed here.

    Raises:
        ValueError: they do.
    """
    nested, flat = raw.get("rope_parameters") or {}, raw.get("rope_theta")
    inner = nested.get("rope_theta")
    if inner is not None and flat is not None and float(inner) != float(flat):
        raise ValueError(f"rope_theta={flat} contradicts rope_parameters.rope_theta={inner}")
    if odd := sorted(nested.keys() - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}):
        raise ValueError(f"rope_parameters.{odd[0]} is not supported")
    if nested.get("partial_rotary_factor", 1) != 1:
        raise ValueError("rope_parameters.partial_rotary_factor is not supported: only 1")


def check_layer_types(raw: Mapping[str, Any]) -> None:
    """Refuse a list of layer types that is not as long as there are layers.

    Raises:
        ValueError: it is not.
    """
    kinds = raw.get("layer_types")
    if kinds is not None and len(kinds) != raw["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(kinds)} entries, which contradicts "
                         f"num_hidden_layers={raw['num_hidden_layers']}")


# --------------------------------------------------------------------------------------------------
# drafters


def drafter_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """z-lab's config.json as the config of room 12, or of kit.published if it asks for more.

    `block_size`, `mask_token_id`, `target_layer_ids` and the scales may stand in `dflash_config`,
    beside it, or in both with one value.

    Raises:
        ValueError: a key is missing, unknown, contradicting, or asks for what is not computed here.
    """
    check_types(raw)
    own = raw.get("dflash_config") or {}
    needed = {*SIZES, "num_hidden_layers", "num_target_layers", "vocab_size"}
    second = sorted(name for name in SECOND if name in own or name in raw)
    if second or list(raw.get("architectures") or []) == ["DFlash2DraftModel"]:
        what = ", ".join(second) or "architectures=['DFlash2DraftModel']"
        raise ValueError(f"{what}: this is a DFlash 2 drafter, whose convolutions and candidate"
                         " selector are not computed here; only DFlashDraftModel is supported")
    if list(raw.get("architectures") or []) != ["DFlashDraftModel"]:
        raise ValueError(f"architectures={raw.get('architectures')} is no DFlash drafter:"
                         " it must be ['DFlashDraftModel']")
    # Windows are read below; everything else is held against the rules of room 02.
    refuse_unsupported({**raw, "layer_types": None, "use_sliding_window": False}, ("qwen3",))
    missing = sorted(needed - raw.keys())
    missing += [name for name in DRAFTER_OWN if name not in own and name not in raw]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    known = {*NEUTRAL, *ONLY, *SCALES, *needed, *DRAFTER_OWN, "dflash_config",
             "target_hidden_size", "draft_vocab_size"}
    unknown = sorted(raw.keys() - known)
    unknown += [f"dflash_config.{k}" for k in sorted(own.keys() - {*DRAFTER_OWN, *ONLY, *SCALES})]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is unknown: it may change the numbers")
    for place, prefix in ((raw, ""), (own, "dflash_config.")):
        for name, allowed in ONLY.items():
            if name in place and place[name] not in allowed:
                raise ValueError(f"{prefix}{name}={place[name]!r} is not supported:"
                                 f" only {allowed[0]!r}")
    for name in (*DRAFTER_OWN, *SCALES):
        if name in own and name in raw and own[name] != raw[name]:
            raise ValueError(f"{name}={raw[name]} contradicts dflash_config.{name}={own[name]}")
    for name, twin in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        if raw.get(name) not in (None, raw[twin]):
            raise ValueError(f"{name}={raw[name]} must equal {twin}={raw[twin]}")
    check_rotary(raw)
    check_layer_types(raw)
    found: dict[str, Any] = {name: own.get(name, raw.get(name)) for name in DRAFTER_OWN}
    scales = {name: own.get(name, raw.get(name)) for name in SCALES}
    # A cap of 0 means none.
    scales["final_logit_softcapping"] = scales["final_logit_softcapping"] or None
    windows, causal = sight(raw)
    said: dict[str, Any] = {k: float(v) for k, v in scales.items() if v is not None}
    config = PublishedConfig(
        **{name: raw[name] for name in SIZES}, **said,
        rope_theta=read_rope_theta(dict(raw)),
        num_hidden_layers=raw["num_hidden_layers"],
        num_target_layers=raw["num_target_layers"],
        vocab_size=raw["vocab_size"],
        target_hidden_size=raw["hidden_size"],
        block_size=found["block_size"],
        mask_token_id=found["mask_token_id"],
        target_layer_ids=tuple(found["target_layer_ids"]),
        windows=windows, causal=causal,
    )
    return config.plain() or config


def sight(raw: Mapping[str, Any]) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """For each layer of a drafter its window (None: none), and whether its slots are causal.

    Raises:
        ValueError: an unknown kind of layer, or one that slides without a usable window.
    """
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None and raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=True without layer_types does not say which layers")
    kinds = kinds or ["full_attention"] * layers
    if odd := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"layer_types has {odd[0]!r}: only 'full_attention' and"
                         " 'sliding_attention' are supported")
    slides, width = [kind == "sliding_attention" for kind in kinds], raw.get("sliding_window")
    if any(slides) and not (raw.get("use_sliding_window") and isinstance(width, int)):
        raise ValueError(f"layer_types has 'sliding_attention', but use_sliding_window="
                         f"{raw.get('use_sliding_window')} and sliding_window={width}")
    said = raw.get("is_causal")
    causal = tuple(slide if said is None else bool(said) for slide in slides)
    return tuple(width if slide else None for slide in slides), causal


def load_drafter(
    folder: Path | str, dtype: torch.dtype | str = "float32", device: str = "cpu",
    num_target_layers: int | None = None,
) -> DraftModel:
    """Read a DFlash drafter in z-lab's format or in that of speculators, frozen.

    `num_target_layers` is needed only where a speculators file does not say it.

    Raises:
        ValueError: see `drafter_config`; or tensors are missing, unknown, misshapen or not finite.
    """
    from minidflash.kit import speculators

    folder, raw = Path(folder), read_json(Path(folder) / CONFIG)
    borrowed: tuple[str, ...] = ()
    with _blame(folder):
        if speculators.is_speculators(raw):
            raw, borrowed = speculators.zlab_from(raw, num_target_layers), speculators.BORROWED
        config = drafter_config(raw)
    kind = PublishedModel if isinstance(config, PublishedConfig) else DraftModel
    return fill(lambda: kind(config), folder, dtype_named(dtype), device, pass_over=borrowed,
                depth=config.num_hidden_layers)


def save_drafter(
    model: DraftModel, folder: Path | str, dtype: torch.dtype | str = "bfloat16",
    max_position_embeddings: int = 32768,
) -> None:
    """Write a drafter in z-lab's format.

    Args:
        model: room 12's.
        folder: is made if needed.
        dtype: how numbers are stored.
        max_position_embeddings: the target's; others size their rotary table by it.

    Raises:
        ValueError: the format has no place for a drafter whose width is not its target's, or a
            weight is not finite in `dtype`.
    """
    folder, kept, c = Path(folder), dtype_named(dtype), model.config
    if c.target_hidden_size != c.hidden_size:
        raise ValueError(f"hidden_size={c.hidden_size} must equal target_hidden_size="
                         f"{c.target_hidden_size}: z-lab's format has no place for another")
    write_tensors(model, folder, kept)
    write_json(folder / CONFIG, zlab_config(c, kept, max_position_embeddings))


def zlab_config(
    c: DrafterConfig, dtype: torch.dtype, max_position_embeddings: int
) -> dict[str, Any]:
    """The config.json of z-lab's format for this drafter.

    Raises:
        ValueError: its layers' windows or causal flags are of a kind that the format cannot say.
    """
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_layer_keys(c, dtype),
        "num_hidden_layers": c.num_hidden_layers,
        "num_target_layers": c.num_target_layers,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "block_size": c.block_size,
        "dflash_config": {
            "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids),
        },
    }
    if isinstance(c, PublishedConfig):
        widths = sorted({w for w in c.windows if w is not None})
        if len(widths) > 1:
            raise ValueError(f"windows={c.windows}: z-lab's format has one sliding_window")
        if widths:
            raw |= {"sliding_window": widths[0], "use_sliding_window": True, "layer_types": [
                "full_attention" if w is None else "sliding_attention" for w in c.windows]}
        if c.causal != tuple(w is not None for w in c.windows):
            if len(set(c.causal)) > 1:
                raise ValueError(f"causal={c.causal}: z-lab's format has one is_causal")
            raw["is_causal"] = c.causal[0]
        for name in SCALES:
            if getattr(c, name) not in (1.0, None):
                raw["dflash_config"][name] = getattr(c, name)
    return raw
