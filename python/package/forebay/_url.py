"""Bucket URLs, and paths for those who save to a directory."""

import hashlib
import json
import os
from typing import Any, Union


def bucket_url(url: Union[str, "os.PathLike[str]"]) -> str:
    """A URL as it is, a path as a `file://` URL."""
    text = os.fspath(url)
    return text if "://" in text else "file://" + os.path.abspath(text)


def make_directory(url: str) -> None:
    """Creates the directory of a `file://` URL that is about to be saved to."""
    if url.startswith("file:///"):
        os.makedirs(url[len("file://") :], exist_ok=True)


def exists(url: str) -> bool:
    """Whether there may be something: False for a directory that is not there."""
    return not url.startswith("file://") or os.path.isdir(url[len("file://") :])


def store_name(url: str) -> list[Any]:
    """What tells the place at a URL from those of that name in other stores."""
    return [url, *(os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))]


def digest(*facts: Any) -> str:
    """32 hex digits that stand for `facts`."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
