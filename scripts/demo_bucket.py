"""A bucket as other tools see it, through boto3 and never through Forebay: for `make demo SOURCE=s3://...`.

    demo_bucket.py fill FOLDER URL      put every file of FOLDER below URL
    demo_bucket.py compare FOLDER URL   check that each file of FOLDER is an object with the same bytes
    demo_bucket.py remove URL           delete everything below URL, unfinished uploads too
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

THREADS = 8
S3 = boto3.client("s3", config=Config(max_pool_connections=THREADS, s3={"addressing_style": "path"}))


def place(url: str) -> tuple[str, str]:
    """Bucket and prefix, the latter with a slash at its end."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix.strip("/") + "/"


def each_file(folder: Path, work) -> int:
    """Runs `work` on each file's path from `folder`, some at once; returns how many there were."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(work, names):
            pass
    return len(names)


def fill(folder: Path, url: str) -> str:
    bucket, prefix = place(url)
    count = each_file(folder, lambda name: S3.upload_file(str(folder / name), bucket, f"{prefix}{name}"))
    return f"{count} objects put into {url}"


def compare(folder: Path, url: str) -> str:
    bucket, prefix = place(url)

    def same(name: Path) -> None:
        if S3.get_object(Bucket=bucket, Key=f"{prefix}{name}")["Body"].read() != (folder / name).read_bytes():
            raise SystemExit(f"error: object {prefix}{name} differs from the file")

    return f"{each_file(folder, same)} files are objects below {url} with the same bytes"


def remove(url: str) -> str:
    bucket, prefix = place(url)
    uploads = S3.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", [])
    for upload in uploads:
        S3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    count = 0
    for page in S3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        keys = [{"Key": found["Key"]} for found in page.get("Contents", [])]
        if keys:
            S3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
        count += len(keys)
    left = S3.list_objects_v2(Bucket=bucket, Prefix=prefix)["KeyCount"]
    if left:
        raise SystemExit(f"error: objects are left below {url}: remove them by hand")
    return f"removed {count} objects; nothing is left below {url}"


def main(words: list[str]) -> None:
    match words:
        case ["fill", folder, url]:
            print(fill(Path(folder), url))
        case ["compare", folder, url]:
            print(compare(Path(folder), url))
        case ["remove", url]:
            print(remove(url))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (BotoCoreError, ClientError) as error:
        raise SystemExit(f"error: boto3: {error}") from error
