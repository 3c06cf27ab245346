"""Chat templates of real models, out of packages that ship them."""

from functools import cache

from support.package_files import Package, package_files

PACKAGES = (
    Package(
        "llama-cpp-python",
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ),
    Package(
        "trl",
        "trl-1.16.0-py3-none-any.whl",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    ),
    Package(
        "vllm",
        "vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    ),
)
_TRAINING = "_training"  # variants of TRL that mark the model's tokens


@cache
def real_templates() -> dict[str, bytes]:
    """Templates by `project/name`, each once; raises OSError without a package index."""
    found: dict[str, bytes] = {}
    for package in PACKAGES:
        for path in package_files(package, ".jinja"):
            name = f"{package.project}/{path.stem}"
            data = path.read_bytes()
            if _TRAINING not in name and data not in found.values():
                found[name] = data
    return found
