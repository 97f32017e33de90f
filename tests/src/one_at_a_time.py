"""moto's S3 server, one conditional write at a time: it looks first and writes then, and lets two writers win on a busy machine,
which the probe of a mount rightly takes for a store that ignores conditions."""

import sys
import threading
from typing import Any, Callable

from moto.s3.responses import S3Response
from moto.server import main

ALONE = threading.Lock()


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        with ALONE:
            return method(*given, **named)

    return call


for name in ("put_object", "_key_response_post"):
    setattr(S3Response, name, alone(getattr(S3Response, name)))
main(sys.argv[1:])
