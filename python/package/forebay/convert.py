"""Steps from and to other formats: `python -m forebay.convert SOURCE TARGET`.

SOURCE and TARGET are told apart by what they are: `hf:DIR` is a Hugging Face directory (`model.safetensors`, or shards
with `model.safetensors.index.json`), `dcp:DIR` one of torch.distributed.checkpoint's own files, anything else a place
of Forebay's steps; `URL@STEP` is one of them. One side is Forebay's.

    python -m forebay.convert s3://bucket/run7@500 hf:./export --part model
    python -m forebay.convert hf:./llama s3://bucket/start
    python -m forebay.convert dcp:./old-run s3://bucket/run7@500 --allow-pickle

To Hugging Face's go the tensors of one part of the state, read and written a shard at a time; nothing else of it can
be kept there. From there comes a state `{PART: {name: tensor}}`. A DCP directory holds whole states and is read and
written as one, in memory. torch reads its files by unpickling them, which can run any code: hence `--allow-pickle`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from . import _native
from ._errors import CheckpointError, CheckpointInvalid, CheckpointMismatch
from ._files import load, save
from ._leaf import SIZES
from ._loading import default_threads, newest_steps, state_tree, with_step
from ._unflatten import Builder, Node, Tensors
from ._url import bucket_url

MAX_HEADER = 100_000_000
"""The longest header that safetensors itself reads, in bytes."""

SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in a file of a Hugging Face directory at most, unless one tensor has more."""

TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Element types that safetensors has, by torch's names."""


def to_hugging_face(
    url: str, folder: Path, step: Optional[int] = None, part: str = "model", shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Writes the tensors of one part of a state as a Hugging Face directory; gives the files' names.

    `part` is a key of the state, or several with dots between them; empty for all of it. Memory: one file's tensors.

    Raises `CheckpointMismatch` when the step has no such part or it holds a type that safetensors has not, and
    `CheckpointInvalid` when the directory holds a model already.
    """
    place = bucket_url(url)
    if step is None:
        # A damaged step is an error here: what was written of it would be mixed with an older one.
        step = next((newest for newest, _, _ in newest_steps(place)), None)
    return with_step(place, step, None, lambda found: export(found, folder, part, shard_bytes))


def from_hugging_face(folder: Path, url: str, step: int = 0, part: str = "model") -> None:
    """Saves the tensors of a Hugging Face directory as the state `{part: {name: tensor}}`, or as the state itself.

    Memory: twice all of them.
    """
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for path in _files_of(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name in tensors:
                    raise CheckpointInvalid(f"{path}: tensor `{name}` is in another file as well")
                tensors[name] = file.get_tensor(name)
    state = tensors
    for key in reversed(part.split(".") if part else []):
        state = {key: state}
    save(state, url, step=step)


def to_dcp(url: str, folder: Path, step: Optional[int] = None, allow_pickle: bool = False) -> None:
    """Writes a state as a directory of torch.distributed.checkpoint. Memory: the whole state."""
    import torch.distributed.checkpoint as dcp

    if (folder / ".metadata").exists():
        raise CheckpointInvalid(f"{folder} holds a checkpoint already")
    state = load(url, step=step, allow_pickle=allow_pickle)
    if not isinstance(state, dict):
        raise CheckpointMismatch("the step's state is no dict, which is all that torch.distributed.checkpoint saves")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def from_dcp(folder: Path, url: str, step: int = 0, allow_pickle: bool = False) -> None:
    """Saves what a directory of torch.distributed.checkpoint holds. Memory: the whole state.

    Raises `CheckpointInvalid` unless `allow_pickle`, since torch unpickles such a directory's files.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    if not allow_pickle:
        text = f"torch reads {folder} by unpickling its files, which can run any code"
        raise CheckpointInvalid(f"{text} (hint: --allow-pickle, if you trust whoever wrote them)")
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    save(state, url, step=step, allow_pickle=True)


def _files_of(folder: Path) -> list[Path]:
    """The files of a Hugging Face directory."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    bad = [name for name in names if os.path.basename(name) != name]
    if bad:
        raise CheckpointInvalid(f"{index}: `{bad[0]}` is no file of this directory")
    return [folder / name for name in names]


def export(step: _native.Step, folder: Path, part: str, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """As `to_hugging_face`, of a step that was opened."""
    tree = state_tree(step, 0)
    builder = Builder(Tensors(step, default_threads()), allow_pickle=False)
    for key in part.split(".") if part else []:
        items = dict((builder.build(name), value) for name, value in _items(tree) or [])
        if key not in items:
            there = ", ".join(f"`{name}`" for name in items) or "nothing"
            raise CheckpointMismatch(f"the state has no part `{part}`: `{key}` is not among {there} (hint: --part)")
        tree = items[key]
    nodes = dict(_tensors(tree, builder, ()))
    if not nodes:
        raise CheckpointMismatch(f"part `{part}` of the state holds no tensors (hint: --part)")
    if _files_of(folder)[0].exists():
        raise CheckpointInvalid(f"{folder} holds a model already")
    groups = _groups(builder.tensors, nodes, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    count = len(groups)
    names = [f"model-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]
    names = ["model.safetensors"] if count == 1 else names
    for name, group in zip(names, groups):
        _write(step, folder / name, {tensor: nodes[tensor] for tensor in group})
    if count > 1:
        sizes = {tensor: _size(builder.tensors, node) for tensor, node in nodes.items()}
        weights = {tensor: name for name, group in zip(names, groups) for tensor in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights}
        # Last: a directory without it is no model.
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


def _items(node: Node) -> Any:
    if isinstance(node, dict) and node.get("t") == "object":
        node = node["v"]
    return node["v"] if isinstance(node, dict) and node.get("t") in ("dict", "odict") else None


def _tensors(node: Node, builder: Builder, path: tuple[str, ...]) -> Iterator[tuple[str, Node]]:
    """The tensors of a tree, by their dotted names."""
    items = _items(node)
    if isinstance(node, list):
        items = enumerate(node)
        for index, value in items:
            yield from _tensors(value, builder, (*path, str(index)))
    elif items is not None:
        for key, value in items:
            yield from _tensors(value, builder, (*path, str(builder.build(key))))
    elif isinstance(node, dict) and node.get("t") == "tensor":
        yield ".".join(path), node


def _shape(tensors: Tensors, node: Node) -> tuple[str, list[int]]:
    _, dtype, shape = tensors.entry(node["n"])
    if dtype not in TYPES:
        raise CheckpointMismatch(f"tensor `{node['n']}` is {dtype}, which safetensors has not")
    return dtype, node["view"][0] if "view" in node else shape


def _size(tensors: Tensors, node: Node) -> int:
    dtype, shape = _shape(tensors, node)
    size = SIZES[dtype]
    for length in shape:
        size *= length
    return size


def _groups(tensors: Tensors, nodes: dict[str, Node], shard_bytes: int) -> list[list[str]]:
    """Which tensors go into one file, in their order."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, node in nodes.items():
        size = _size(tensors, node)
        if groups[-1] and held + size > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _write(step: _native.Step, path: Path, nodes: dict[str, Node]) -> None:
    """Reads some tensors and writes them as a file, under another name until it is whole."""
    builder = Builder(Tensors(step, default_threads()), allow_pickle=False)
    builder.tensors.want(list(nodes.values()))
    builder.tensors.read()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Largest elements first, so that each tensor is aligned to its own.
    order = sorted(nodes, key=lambda name: (-SIZES[_shape(builder.tensors, nodes[name])[0]], name))
    end = 0
    for name in order:
        dtype, shape = _shape(builder.tensors, nodes[name])
        start, end = end, end + _size(builder.tensors, nodes[name])
        header[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointMismatch(f"{len(nodes)} tensors are more than safetensors has in a file (hint: --shard-size)")
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(memoryview(_dense(builder.build(nodes[name]))))
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _dense(tensor: Any) -> Any:
    """The bytes of a tensor, in row-major order."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def _size_of(text: str) -> int:
    """Bytes, as `5GB` or `500MiB` says it."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B?", text)
    if found is None or int(found.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB")
    unit = " KMGT".index(found.group(2) or " ")
    size: int = int(found.group(1)) * (1024 if found.group(3) else 1000) ** unit
    return size


def _place(text: str) -> tuple[str, str, Optional[int]]:
    """What a SOURCE or TARGET is: its kind, where it is, and the step."""
    kind, _, rest = text.partition(":")
    if kind in ("hf", "dcp"):
        return kind, rest, None
    found = re.fullmatch(r"(.*)@(\d+)", text)
    return ("forebay", text, None) if found is None else ("forebay", found.group(1), int(found.group(2)))


def _run(arguments: argparse.Namespace) -> None:
    (kind, source, step), (other, target, number) = _place(arguments.source), _place(arguments.target)
    if (kind == "forebay") == (other == "forebay"):
        raise CheckpointInvalid("one of SOURCE and TARGET is Forebay's, the other hf:DIR or dcp:DIR")
    if other == "hf":
        files = to_hugging_face(source, Path(target), step, arguments.part, arguments.shard_size)
        print("\n".join(files))
    elif other == "dcp":
        to_dcp(source, Path(target), step, arguments.allow_pickle)
    elif kind == "hf":
        from_hugging_face(Path(source), target, number or 0, arguments.part)
    else:
        from_dcp(Path(source), target, number or 0, arguments.allow_pickle)


def main(words: Optional[list[str]] = None) -> int:
    """Runs the command; gives the exit code."""
    _, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m forebay.convert", description=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--part", default="model", help="which part of the state; '' for all of it [model]")
    parser.add_argument("--shard-size", type=_size_of, default=SHARD_BYTES, help="of a Hugging Face file [5GB]")
    parser.add_argument("--allow-pickle", action="store_true", help="unpickle what SOURCE holds")
    try:
        _run(parser.parse_args(words))
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
