"""Imports every module of the project with warnings as errors: the quickest sign of an unsuitable Python or JAX."""

import importlib
import pkgutil
import sys
import warnings

import jax

PACKAGES = ("mesh", "pallas_kernels", "moex", "configs")


def main() -> int:
    """Imports package by package; an import that fails ends the run with its traceback."""
    warnings.simplefilter("error")
    count = 0
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
                count += 1
    print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}: {count + len(PACKAGES)} modules import")
    return 0


if __name__ == "__main__":
    sys.exit(main())
