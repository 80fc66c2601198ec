"""Run the checks: `python benchmarks/gpu_check` from anywhere, or `python -m benchmarks.gpu_check` in the checkout."""

import pathlib
import sys

if __name__ == "__main__":
    # Not this folder, some of whose modules are called as installed packages are (kernels), nor the checkout's root.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    from gpu_check.command import main

    sys.exit(main())
