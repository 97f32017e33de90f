"""Bucket URLs, and paths for those who save to a directory."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Union

from . import _native
from ._errors import CheckpointDenied, CheckpointError, CheckpointInvalid, CheckpointNoSpace, CheckpointNotFound
from ._mounts import mount_of


_KINDS: dict[int, type[CheckpointError]] = {
    errno.EACCES: CheckpointDenied,
    errno.EPERM: CheckpointDenied,
    errno.EROFS: CheckpointDenied,
    errno.ENOSPC: CheckpointNoSpace,
    errno.EDQUOT: CheckpointNoSpace,
}
"""What keeps a directory from being made, where the place itself is not at fault."""


def bucket_url(url: Union[str, "os.PathLike[str]"]) -> str:
    """A URL as it is, a path as a `file://` URL.

    Raises `CheckpointInvalid` for what is neither.
    """
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        allowed = "s3://bucket/prefix, gs://, az://, file:///directory, or a directory"
        raise CheckpointInvalid(f"url is {url!r}; it is {allowed}")
    if re.match(r"(s3|gs|az|file):(?!//)", text):
        raise CheckpointInvalid(f"url is {text!r}, which lacks a slash (hint: ./{text} names a directory)")
    made = re.search(r"/(s3|gs|az|file):/+", text if "://" not in text else "")
    # Who begins with `./` means it, and what was once saved to such a directory is there.
    if made and not text.startswith("./") and not os.path.isdir(os.path.expanduser(text[: made.end(1) + 1])):
        hint = "Lightning and others take a directory, and s3:// only where s3fs is installed"
        raise CheckpointInvalid(f"url is {text!r}, a path made of the URL {made[1]}:// (hint: {hint})")
    named = re.search(r"@(\d+(\.\d+)?)$", text)
    if named:
        hint = f"step={named[1]!r} names one; a directory whose own name ends so takes a slash at its end"
        raise CheckpointInvalid(f"url is {text!r}, which ends as step {named[1]} does on a command line (hint: {hint})")
    if "://" not in text:
        return "file://" + os.path.abspath(os.path.expanduser(text))
    _native.check_url(text)
    return text


def make_directory(url: str) -> None:
    """Creates the directory of a `file://` URL that is about to be saved to."""
    if not url.startswith("file:///"):
        return
    try:
        os.makedirs(url[len("file://") :], exist_ok=True)
    except OSError as error:
        kind = _KINDS.get(error.errno or 0, CheckpointInvalid)
        raise kind(f"{url} is no directory and cannot be made one: {error}") from error


def exists(url: str) -> bool:
    """Whether there may be something: False for a directory that is not there."""
    return not url.startswith("file://") or os.path.isdir(url[len("file://") :])


def source_url(url: Union[str, "os.PathLike[str]"]) -> str:
    """As `bucket_url`, of what is about to be read. Raises `CheckpointNotFound` for a directory that is not there."""
    place = bucket_url(url)
    if not exists(place) and not os.path.lexists(place[len("file://") :]):
        raise missing(place, "check the path; the first save of a run makes its directory")
    return place


def source_path(path: Union[str, "os.PathLike[str]"]) -> Path:
    """A file or directory that is about to be read. Raises `CheckpointNotFound` for one that is not there."""
    found = user_path(path)
    if not os.path.lexists(found):
        raise missing(str(found), "check the path")
    return found


def user_path(path: Union[str, "os.PathLike[str]"]) -> Path:
    """A path of this host, with the home directory for `~`."""
    return Path(os.path.expanduser(path))


def missing(place: str, hint: str) -> CheckpointNotFound:
    """What there is to say of a path where nothing is."""
    return CheckpointNotFound(f"{place}: No such file or directory (hint: {hint})")


def store_name(url: str) -> list[Any]:
    """What tells the place at a URL from those of that name in other stores; of directories nothing but the path, as this is to
    be the same after the host started anew."""
    return [url, *(os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))]


def memory_name(url: str) -> list[Any]:
    """As `store_name`, for as long as the host runs: directories of one path in several containers are told apart."""
    return [*store_name(url), *_mount(url)]


def meeting_name(url: str) -> list[str]:
    """What the ranks of a job say alike of its place, which each of them may have mounted for itself: a mount that has no other name
    than its number is left out, as they would wait for each other in vain."""
    mount = _mount(url)
    return [url] if mount and mount[0].startswith("0:") else [url, *mount]


def _mount(url: str) -> list[str]:
    return mount_of(os.path.normpath(url[len("file://") :])) if url.startswith("file:///") else []


def digest(*facts: Any) -> str:
    """32 hex digits that stand for `facts`."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
