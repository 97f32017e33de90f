"""Steps from and to other formats: `python -m forebay.convert SOURCE TARGET`.

SOURCE and TARGET are told apart by what they are: `hf:DIR` is a Hugging Face directory (`model.safetensors`, or shards
with `model.safetensors.index.json`), `dcp:DIR` one of torch.distributed.checkpoint's own files, anything else a place
of Forebay's steps; `URL@STEP` is one of them. A SOURCE may also be `pt:FILE`, one of `torch.save`'s. Where neither side
is Forebay's, a step between them takes the state's room in the directory that holds TARGET, until all is done.

    python -m forebay.convert s3://bucket/run7@500 hf:./export --part model
    python -m forebay.convert hf:./llama s3://bucket/start
    python -m forebay.convert dcp:./old-run s3://bucket/run7@500 --allow-pickle
    python -m forebay.convert pt:./model.pt s3://bucket/start
    python -m forebay.convert dcp:./old-run hf:./export --part model --allow-pickle

To Hugging Face's go the tensors of one part of the state, a few at a time; nothing else of it can be kept there. From
there comes a state `{PART: {name: tensor}}`. (`forebay ckpt convert` does the same, without Python.) A DCP directory
or a file of torch's holds whole states; they pass through memory a tensor at a time. torch reads a DCP directory by
unpickling its files, which can run any code: hence `--allow-pickle`. A file needs it where it holds other objects than
tensors and plain values.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

from . import _native
from ._errors import (
    CheckpointConflict,
    CheckpointCorrupt,
    CheckpointDenied,
    CheckpointError,
    CheckpointInvalid,
    CheckpointMismatch,
    CheckpointNoSpace,
    CheckpointNotFound,
    CheckpointUnavailable,
    CheckpointWarning,
)
from ._loading import newest_steps, with_step
from ._options import StepName, step_name
from ._ranks import new_start
from ._url import bucket_url, make_directory, source_path, source_url, user_path

SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in a file of a Hugging Face directory at most, unless one tensor has more."""


def to_hugging_face(
    url: str, folder: Path, step: Optional[StepName] = None, part: str = "model", shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Writes the tensors of one part of a state as a Hugging Face directory; gives the files' names.

    `part` is a key of the state, or several with dots between them; empty for all of it. Of tensors that ranks have under
    one name and not alike the lowest rank's is written, with a warning. Memory: some 64 MiB.

    Raises `CheckpointInvalid` when the step has no such part, it holds a type that safetensors has not, or the directory
    holds a model already.
    """
    place, folder = source_url(url), user_path(folder)
    step = _newest(place, step)
    files, differing = with_step(place, step, None, lambda found: found.export(str(folder), part, shard_bytes))
    if differing:
        text = f"step {step}: ranks differ in {', '.join(differing[:5])}, of which the lowest rank's is written"
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    return files


def _newest(place: str, step: Optional[StepName]) -> Optional[StepName]:
    """The step, or the newest one. A damaged one is an error here: an older one is not what was asked for."""
    return next((newest for newest, _, _ in newest_steps(place)), None) if step is None else step


def from_hugging_face(folder: Path, url: str, step: int = 0, part: str = "model") -> None:
    """Saves the tensors of a Hugging Face directory as the state `{part: {name: tensor}}`, or as the state itself.

    What the directory holds beside what its index says is warned of. Memory: some 128 MiB.
    """
    source, place = bucket_url(source_path(folder)), bucket_url(url)
    make_directory(place)
    for text in _native.import_model(source, place, new_start(), step, part):
        warnings.warn(text, CheckpointWarning, stacklevel=2)


def to_dcp(url: str, folder: Path, step: Optional[StepName] = None, allow_pickle: bool = False) -> None:
    """Writes a state as a directory of torch.distributed.checkpoint.

    Memory: two of its largest tensors, all that are arrays or bytes, and what the allocator keeps of freed ones below 32 MiB.
    """
    import torch.distributed.checkpoint as dcp

    from ._outline import Planner, outline

    place, folder = source_url(url), user_path(folder)
    if (folder / ".metadata").exists():
        raise CheckpointInvalid(f"{folder} holds a checkpoint already")

    def write(found: _native.Step) -> None:
        state, read = outline(found, allow_pickle)
        if not isinstance(state, dict):
            text = "the step's state is no dict, which is all that torch.distributed.checkpoint saves"
            raise CheckpointMismatch(text)
        # One tensor after another, on machines with devices as well.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(state, storage_writer=writer, planner=Planner(read), no_dist=True)
        except dcp.CheckpointException as error:
            # What one of its writers met.
            for met, _ in error.failures.values():
                raise met from error
            raise

    with_step(place, _newest(place, step), None, write)


def from_dcp(folder: Path, url: str, step: int = 0, allow_pickle: bool = False) -> None:
    """Saves what a directory of torch.distributed.checkpoint holds, however many ranks wrote it.

    Memory: two of the largest parts of tensors that a rank wrote, all that are no tensors, and some 128 MiB.

    Raises `CheckpointInvalid` unless `allow_pickle`, since torch unpickles such a directory's files.
    """
    from ._torch_files import save_directory

    if not allow_pickle:
        text = f"torch reads {folder} by unpickling its files, which can run any code"
        raise CheckpointInvalid(f"{text} (hint: --allow-pickle, if you trust whoever wrote them)")
    folder = source_path(folder)
    if folder.is_dir() and not (folder / ".metadata").exists():
        text = "holds no checkpoint of torch.distributed.checkpoint, which has a file `.metadata`"
        raise CheckpointNotFound(f"{folder} {text} (hint: check the path)")
    save_directory(folder, bucket_url(url), step)


def from_file(file: Path, url: str, step: int = 0, allow_pickle: bool = False) -> None:
    """Saves what `torch.save` wrote to a file: a state of tensors and plain values, or with `allow_pickle` any.

    Memory: the largest tensor that is not contiguous, all that are no tensors, and some 128 MiB; all of it where the file
    is of before torch 1.6.

    Raises `CheckpointInvalid` when the file is none of torch's, or holds other objects.
    """
    from ._torch_files import save_file

    save_file(source_path(file), bucket_url(url), step, allow_pickle)


def _size_of(text: str) -> int:
    """Bytes, as `5GB` or `500MiB` says it."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B?", text)
    if found is None or int(found.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB")
    unit = " KMGT".index(found.group(2) or " ")
    size: int = int(found.group(1)) * (1024 if found.group(3) else 1000) ** unit
    return size


def _place(text: str) -> tuple[str, str, Optional[StepName]]:
    """What a SOURCE or TARGET is: its kind, where it is, and the step."""
    kind, _, rest = text.partition(":")
    if kind in ("hf", "dcp", "pt"):
        return kind, rest, None
    url, mark, step = text.rpartition("@")
    if not mark or "/" in step:
        return "forebay", text, None
    if re.fullmatch(r"\d+(?:\.\d+)?", step) is None:
        hint = "@500 behind the URL means one step; a place whose own name has an `@` takes a slash at its end"
        raise CheckpointInvalid(f"{text}: `{step}` is no step (hint: {hint})")
    return "forebay", url, step


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Converts; gives what there is now, as `--json` tells it."""
    (kind, source, step), (other, target, number) = _place(arguments.source), _place(arguments.target)
    if kind == other:
        raise CheckpointInvalid(
            f"SOURCE and TARGET are of one kind, {kind} (hint: hf:DIR, dcp:DIR and, of a SOURCE, pt:FILE are others)"
        )
    if other == "pt":
        raise CheckpointInvalid("pt:FILE is a SOURCE only (hint: torch.save(forebay.load(URL), FILE) writes one)")
    source = source if kind == "forebay" else _folder(kind, source)
    target = target if other == "forebay" else _folder(other, target)
    if kind == "forebay":
        return _export(source, step, other, user_path(target), arguments)
    if other == "forebay":
        saved, start = step_name(number)
        if start is not None:
            raise CheckpointInvalid(f"{arguments.target} names a start, which a step that is saved is given")
        if not arguments.force:
            _refuse_to_end_training(target, saved)
        _import(kind, Path(source), target, saved or 0, arguments)
        place = bucket_url(target)
        return with_step(place, saved or 0, None, lambda found: _told({"step": found.step}, _sizes_in_step(found)))
    folder = user_path(target).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".forebay-convert-") as between:
        _import(kind, Path(source), between, 0, arguments)
        return _export(between, 0, other, user_path(target), arguments)


def _folder(kind: str, place: str) -> str:
    """The directory or file that `hf:`, `dcp:` or `pt:` stands before."""
    folder = place.removeprefix("file://")
    if "://" in folder:
        text = f"`{kind}:{folder}` is no directory: what torch and Hugging Face write lies in a file system"
        raise CheckpointInvalid(f"{text} (hint: mount the bucket)")
    return folder


def _refuse_to_end_training(url: str, step: Optional[int]) -> None:
    """Raises `CheckpointConflict` where the step would not come after all that are there."""
    try:
        newest = max((number for number, _, _ in newest_steps(bucket_url(url), True)), default=None)
    except CheckpointError:
        # It is made by the conversion, or tells what is wrong with it.
        return
    if newest is not None and (step is None or step <= newest):
        text = f"{url} holds step {newest}, which would not be the newest any more; a training that saves there would end"
        hint = f"convert to a URL of its own; {url}@{newest + 1} comes after what is there, and --force lets any step be the newest"
        raise CheckpointConflict(f"{text} (hint: {hint})")


def _export(url: str, step: Optional[StepName], kind: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    if kind == "hf":
        names = to_hugging_face(url, folder, step, arguments.part, arguments.shard_size)
        return _told({"files": names}, [size for name in names for size in _sizes_in_file(folder / name)])
    to_dcp(url, folder, step, arguments.allow_pickle)
    return _told({"files": sorted(path.name for path in folder.iterdir())}, _sizes_in_directory(folder))


def _told(what: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    return {**what, "tensors": len(sizes), "bytes": sum(sizes)}


def _sizes_in_step(step: _native.Step) -> list[int]:
    widths = dict(_native.dtypes())
    return [widths[dtype] * math.prod(shape) for _, dtype, shape, _ in step.tensors()]


def _sizes_in_file(path: Path) -> list[int]:
    """Of the tensors of one file of safetensors, as its header tells."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    ends = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return [end - start for start, end in ends]


def _sizes_in_directory(folder: Path) -> list[int]:
    """Of the tensors of a directory of torch.distributed.checkpoint, which was just written here."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return [math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors]


def _import(kind: str, source: Path, url: str, step: int, arguments: argparse.Namespace) -> None:
    if kind == "hf":
        from_hugging_face(source, url, step, arguments.part)
    elif kind == "pt":
        from_file(source, url, step, arguments.allow_pickle)
    else:
        from_dcp(source, url, step, arguments.allow_pickle)


def main(words: Optional[list[str]] = None) -> int:
    """Runs the command; gives the exit code."""
    _, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m forebay.convert", description=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--part", default="model", help="which part of the state; '' for all of it [model]")
    sizes = ("--shard-size", "--max-shard-size")
    parser.add_argument(*sizes, type=_size_of, default=SHARD_BYTES, help="of a Hugging Face file [5GB]")
    parser.add_argument("--allow-pickle", action="store_true", help="unpickle what SOURCE holds")
    parser.add_argument("--force", action="store_true", help="also where what is saved does not come after what is there")
    parser.add_argument("--json", action="store_true", help="tell the step or the files, tensors and bytes as JSON")
    arguments = parser.parse_args(words)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warner(arguments.json)
            warnings.simplefilter("always", CheckpointWarning)
            # By this process alone is just how it is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            told = _run(arguments)
    except (CheckpointError, OSError) as error:
        return _failed(error, str(error), arguments.json)
    except ModuleNotFoundError as error:
        text = f"{error} (hint: torch's files need torch in this Python, {sys.executable})"
        return _failed(error, text, arguments.json)
    if arguments.json:
        print(json.dumps(told))
    elif arguments.target.startswith("hf:"):
        print("\n".join(told["files"]))
    return 0


_KINDS = {
    CheckpointNotFound: "not found",
    CheckpointCorrupt: "corrupt",
    CheckpointUnavailable: "unavailable",
    CheckpointConflict: "conflict",
    CheckpointDenied: "denied",
    CheckpointNoSpace: "no space",
    FileNotFoundError: "not found",
    FileExistsError: "exists",
    PermissionError: "denied",
    OSError: "unavailable",
}
"""What the command line calls errors; all others are `invalid`."""


def _failed(error: Exception, text: str, as_json: bool) -> int:
    """Tells an error, as JSON in the form of the `forebay` command."""
    if as_json:
        said, _, hint = text.partition(" (hint: ")
        kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "invalid")
        text = json.dumps({"kind": kind, "error": said, "hint": hint.removesuffix(")") or None})
    else:
        text = f"error: {text}"
    print(text, file=sys.stderr)
    return 1


def _warner(as_json: bool) -> Callable[..., None]:
    """Tells warnings of this package as the `forebay` command does, and others as Python."""
    usual = warnings.showwarning

    def show(message: Union[Warning, str], category: type[Warning], *rest: Any, **named: Any) -> None:
        if not issubclass(category, CheckpointWarning):
            usual(message, category, *rest, **named)
            return
        print(json.dumps({"warning": str(message)}) if as_json else f"warning: {message}", file=sys.stderr)

    return show


if __name__ == "__main__":
    sys.exit(main())
