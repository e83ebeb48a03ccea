"""A cache on disk: tensors in safetensors, all else in a JSON manifest, and checks that it still fits its model.

    <dir>/manifest.json       scheme, agents, lengths, digests of the base's v_proj and of every adapter's A
    <dir>/cache.safetensors   K, V and LR of each layer up to the length in use, the token record, the stacked A's

Written into a folder beside the target, flushed, and renamed, so that no half of a cache is ever in its place. An older
cache there is renamed first: a crash between the two renames leaves both beside it, under hidden names, and reading says
where. Read only if every byte is the one that was written and model and adapters are those it was written with.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .agents import Mixed
from .banks import LRBank
from .errors import CacheFileError
from .fingerprint import adapter_digests, base_layer, check_fits, model_facts
from .placement import device_of

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["read_cache", "read_manifest", "write_cache"]

_FORMAT, _VERSION = "lragent_hf cache", 1
_MANIFEST, _TENSORS = "manifest.json", "cache.safetensors"


def write_cache(cache: "LoRASharedCache", path: str | os.PathLike[str]) -> None:
    """Write ``cache`` to the folder ``path``. See ``LoRASharedCache.save``."""
    target = Path(path).resolve()
    if target.exists() and not _is_ours(target):
        raise FileExistsError(f"{target} exists and is not a saved cache: choose another folder, or remove it first.")
    tensors = dict(_tensors(cache))
    manifest = _manifest(cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        save_file(tensors, made / _TENSORS)
        manifest["tensors"] = {"sha256": _file_digest(made / _TENSORS), "bytes": (made / _TENSORS).stat().st_size}
        (made / _MANIFEST).write_text(json.dumps({"sha256": _json_digest(manifest), "manifest": manifest}, indent=1))
        for file in (made / _TENSORS, made / _MANIFEST, made):
            _flush(file)
        made.chmod(0o755)
        _exchange(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_ours(target: Path) -> bool:
    """Whether a folder is empty, or a saved cache and nothing else."""
    if not target.is_dir():
        return False
    names = {one.name for one in target.iterdir()}
    if not names <= {_MANIFEST, _TENSORS}:
        return False
    return not names or (_MANIFEST in names and _FORMAT.encode() in (target / _MANIFEST).read_bytes())


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a saved cache, whole and of this format.

    Raises:
        CacheFileError: it is missing, torn, or of another format.
    """
    file = Path(path) / _MANIFEST
    try:
        outer = json.loads(file.read_text())
        manifest: dict[str, Any] = outer["manifest"]
        whole = outer["sha256"] == _json_digest(manifest)
    except FileNotFoundError:
        left = sorted(str(one.parent) for one in file.parent.parent.glob(f".{file.parent.name}.*/{_MANIFEST}"))
        hint = f" Saving was interrupted; rename one of {left} to it." if left else ""
        raise CacheFileError(f"{file.parent} holds no saved cache: there is no {_MANIFEST} in it.{hint}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheFileError(f"{file} is damaged ({error}). Save the cache again.") from error
    if not whole:
        raise CacheFileError(f"{file} is damaged: it is not what was written. Save the cache again.")
    if manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        raise CacheFileError(
            f"{file} has format {manifest.get('format')!r} version {manifest.get('version')}, this library reads "
            f"{_FORMAT!r} version {_VERSION}. Load it with the version of lragent_hf that wrote it: "
            f"{manifest.get('lragent_hf')}."
        )
    return manifest


def read_cache(cache: "LoRASharedCache", manifest: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fill the new, empty ``cache`` from ``path``, after all checks. See ``LoRASharedCache.load``."""
    check_fits(cache, manifest)
    file = Path(path) / _TENSORS
    said = manifest["tensors"]
    try:
        size, digest = file.stat().st_size, _file_digest(file)
    except OSError as error:
        raise CacheFileError(f"{file} cannot be read ({error}). Save the cache again.") from error
    if size != said["bytes"] or digest != said["sha256"]:
        raise CacheFileError(
            f"{file} is damaged: {size:,} bytes, {said['bytes']:,} were written"
            + (", and they differ" if size == said["bytes"] else "")
            + ". Save the cache again."
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            _fill(cache, manifest, tensors)
    except SafetensorError as error:
        raise CacheFileError(f"{file} is damaged ({error}). Save the cache again.") from error


# --- what is written ---------------------------------------------------------------------------------------------------


def _tensors(cache: "LoRASharedCache") -> Iterator[tuple[str, Tensor]]:
    """Every tensor, on CPU, contiguous and without spare room."""
    ledger, record = cache.ledger, cache.trajectory
    for index, layer in enumerate(cache.layers):
        for group, buffers in layer.groups():
            for number, (key, buffer) in enumerate(buffers.items()):
                yield f"layers.{index}.{group}.{number}", _plain(buffer.read(ledger.valid(group, key)))
    if record.total:
        for name, buffer in (("tokens", record.tokens), ("mask", record.mask)):
            yield f"record.{name}", _plain(buffer.read(record.total))
    for (kind, _), angles in cache.rotary.groups.items():
        for name, buffer in zip(("cos", "sin"), angles, strict=True):
            yield f"rotary.{kind}.{name}", _plain(buffer.read(ledger.rotary))
    if cache.hidden.capacity:
        yield "hidden", _plain(cache.hidden.read(ledger.total))
    for number, bank in enumerate(cache.roster.banks.values()):
        for position, stack in enumerate(bank.stacks):
            if stack is not None:
                yield f"banks.{number}.{position}", _plain(stack)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _manifest(cache: "LoRASharedCache") -> dict[str, Any]:
    from . import __version__

    ledger, record = cache.ledger, cache.trajectory
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "lragent_hf": __version__,
        "scheme": asdict(cache.scheme),
        "handover_window": ledger.window,
        "agents": cache.roster.declared,
        "key_lr": cache.roster.keys,
        "hidden_cache": cache.hidden_cache,
        "model": model_facts(cache),
        "adapters": adapter_digests(cache),
        "ledger": {
            "total": ledger.total,
            "turns": [_raw(agent) for agent in ledger.turns],
            "last": _raw(ledger.last),
            "streams": [(_raw(agent), length) for agent, length in ledger.streams.items()],
            "lr": [(_raw(bank), length) for bank, length in ledger.lr.items()],
            "rotary": ledger.rotary,
            "writers": [(_raw(agent), count) for agent, count in _runs(ledger.writers)],
            "progress": None if ledger.progress is None else (_raw(ledger.progress[0]), ledger.progress[1]),
        },
        "record": {
            "rows": record.rows,
            "total": record.total,
            "has_pads": record.has_pads,
            "conventions": sorted(record.conventions),
            "unknown_by": _raw(record.unknown_by),
            "unknown_from": record.unknown_from,
        },
        "banks": [
            {"key": _raw(key), "align": bank.align, "columns": bank.columns, "layers": len(bank.stacks)}
            for key, bank in cache.roster.banks.items()
        ],
        "rotary": sorted({kind for kind, _ in cache.rotary.groups}),
        "bank_of": list(cache.roster.bank_of.items()),
        "layers": [
            {group: [_raw(key) for key in buffers] for group, buffers in layer.groups()} for layer in cache.layers
        ],
    }


def _runs(writers: list[Any]) -> list[list[Any]]:
    """Who wrote each position, as [agent, count] runs."""
    runs: list[list[Any]] = []
    for agent in writers:
        if runs and runs[-1][0] == agent:
            runs[-1][1] += 1
        else:
            runs.append([agent, 1])
    return runs


# --- what is read ------------------------------------------------------------------------------------------------------


def _fill(cache: "LoRASharedCache", manifest: dict[str, Any], tensors: Any) -> None:
    said, ledger, record = manifest["ledger"], cache.ledger, cache.trajectory
    ledger.total = said["total"]
    ledger.turns = dict.fromkeys(map(_key, said["turns"]))
    ledger.last = _key(said["last"])
    ledger.streams = {_key(agent): length for agent, length in said["streams"]}
    ledger.rotary = said["rotary"]
    ledger.lr = {_key(bank): length for bank, length in said["lr"]}
    ledger.writers = [_key(agent) for agent, count in said["writers"] for _ in range(count)]
    ledger.progress = None if said["progress"] is None else (_key(said["progress"][0]), said["progress"][1])
    facts = manifest["record"] | {"conventions": frozenset(manifest["record"]["conventions"])}
    for name, value in facts.items():
        setattr(record, name, _key(value) if name == "unknown_by" else value)
    device = device_of(cache.binding.decoder)
    if record.total:
        record.tokens.write(0, tensors.get_tensor("record.tokens").to(device))
        record.mask.write(0, tensors.get_tensor("record.mask").to(device))
    for kind in manifest["rotary"]:
        angles = (tensors.get_tensor(f"rotary.{kind}.{name}").to(device) for name in ("cos", "sin"))
        cache.rotary.write(kind, 0, tuple(angles))
    if "hidden" in tensors.keys():  # noqa: SIM118 - a file, not a dict
        cache.hidden.write(0, tensors.get_tensor("hidden").to(cache.hidden.device or device))
    sites = cache.binding.sites(cache.roster.keys)
    for number, bank in enumerate(manifest["banks"]):
        names = set(tensors.keys())
        stacks = [
            tensors.get_tensor(name).to(device_of(base_layer(sites[position].module)))
            if (name := f"banks.{number}.{position}") in names
            else None
            for position in range(bank["layers"])
        ]
        columns = [{name: tuple(place) for name, place in layer.items()} for layer in bank["columns"]]
        cache.roster.banks[_key(bank["key"])] = LRBank(bank["align"], stacks, columns)
    cache.roster.bank_of.update({adapter: _key(key) for adapter, key in manifest["bank_of"]})
    for index, layer in enumerate(cache.layers):
        mine = cache.binding.layers.get(index)
        place = device if mine is None else device_of(mine.attention)
        for group, buffers in layer.groups():
            for number, raw in enumerate(manifest["layers"][index][group]):
                key = _key(raw)
                rows = tensors.get_tensor(f"layers.{index}.{group}.{number}")
                layer.home = place
                buffers[key] = layer.new_buffer(group)
                buffers[key].write(0, rows.to(layer.device or place))


def _raw(key: Any) -> Any:
    """A stream, bank or agent for JSON."""
    return {"rows": key.rows} if isinstance(key, Mixed) else key


def _key(raw: Any) -> Any:
    """What ``_raw`` was given, from what JSON made of it: agents are tuples."""
    if isinstance(raw, dict):
        return Mixed(map(tuple, raw["rows"]))
    return tuple(raw) if isinstance(raw, list) else raw


# --- bytes -------------------------------------------------------------------------------------------------------------


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(made: Path, target: Path) -> None:
    """Put ``made`` in the place of ``target``, which may be an older saved cache."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        try:
            os.rename(target, old)  # over an empty folder
            try:
                os.rename(made, target)
            except OSError:
                os.rename(old, target)
                raise
        finally:
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(made, target)
    _flush(target.parent)
