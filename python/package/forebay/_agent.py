"""The agent's process: `python -I -S _agent.py FD`, started by `_process.py`.

It is run by path and loads nothing but the engine beside it: neither torch nor the rest of this package.
"""

import importlib.machinery
import importlib.util
import os
import sys


def main() -> None:
    """Serves the trainer at the other end of the socket that was inherited as descriptor FD."""
    folder = os.path.dirname(os.path.abspath(__file__))
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    found = [path for path in (os.path.join(folder, "_native" + s) for s in suffixes) if os.path.exists(path)]
    loader = importlib.machinery.ExtensionFileLoader("_native", found[0])
    spec = importlib.util.spec_from_loader("_native", loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    native.run_agent(int(sys.argv[1]))


if __name__ == "__main__":
    main()
