"""An object store on loopback that speaks S3: moto, and what boto reads from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

BUCKET = "lenses"


@contextmanager
def s3_server() -> Iterator[tuple[ThreadedMotoServer, S3FileSystem]]:
    """Start a server with an empty bucket, and yield it with its file system."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    with patch.dict(os.environ, settings):
        S3FileSystem.clear_instance_cache()
        store = S3FileSystem()
        store.mkdir(BUCKET)
        try:
            yield server, store
        finally:
            S3FileSystem.clear_instance_cache()
            server.stop()


def upload(store: S3FileSystem, directory: Path, name: str) -> str:
    """Copy a directory into the bucket, and return its address."""
    for file in directory.iterdir():
        store.put_file(str(file), f"{BUCKET}/{name}/{file.name}")
    return f"s3://{BUCKET}/{name}"
