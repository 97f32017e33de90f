"""Bucket URLs, and paths for those who save to a directory."""

import os
from typing import Union


def bucket_url(url: Union[str, "os.PathLike[str]"]) -> str:
    """A URL as it is, a path as a `file://` URL."""
    text = os.fspath(url)
    return text if "://" in text else "file://" + os.path.abspath(text)


def make_directory(url: str) -> None:
    """Creates the directory of a `file://` URL that is about to be saved to."""
    if url.startswith("file:///"):
        os.makedirs(url[len("file://") :], exist_ok=True)
