"""What an engine's process does before `import mlx.core`, and the facts of the machine.

`import mlxkv` does none of this: in somebody else's process environment and BLAS are theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import importlib.util
import os
import platform
import re
import site
import sys
from pathlib import Path
from typing import Any

from oracle.formats.errors import Refusal, install

# Fastest first: tokens per second of one-row products, which decoding is made of, decide
# (`mlxkv bench`).
_BLAS = {
    "/usr/lib/*/blis-pthread/libblis.so.*": "BLIS",
    "/usr/lib*/libblisp.so.*": "BLIS",
    "/usr/lib*/libblis.so.*": "BLIS",
    "/usr/lib/*/openblas-pthread/libopenblas.so.*": "OpenBLAS",
    "/usr/lib/*/libopenblas.so.*": "OpenBLAS",
    "/usr/lib*/libopenblasp.so.*": "OpenBLAS",
    "/usr/lib*/libopenblas.so.*": "OpenBLAS",
    f"{sys.prefix}/lib/libmkl_rt.so.*": "MKL",
}
_REFERENCE = "reference (from MLX)"

MLX_LEAST = (0, 29)
"""As pyproject.toml says. MLX 0.24.1 is reported to end the whole process where it multiplies half
precision on a CPU."""


def prepare(device: str = "auto", *, threads: int | None = None) -> dict[str, Any]:
    """Sets this process up for MLX on `device` (auto, gpu or cpu); what a report must say of it.

    `threads` are those of the BLAS on Linux, one per core when None. This must be the process's
    first use of MLX. Raises Refusal where MLX, the device or the named BLAS cannot be had.
    """
    threads = os.cpu_count() or 1 if threads is None else threads
    for name in ("BLIS_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    # On some GPUs MLX multiplies float32 matrices of two and more rows with 10-bit mantissas,
    # unless it is told not to before it starts.
    os.environ["MLX_ENABLE_TF32"] = "0"
    own = "Accelerate" if sys.platform == "darwin" else "unknown"
    blas = load_blas() if sys.platform == "linux" else own
    mx = require_mlx()
    used = _choose(mx, device)
    mx.set_default_device(mx.gpu if used == "gpu" else mx.cpu)
    gpu_name = str(mx.device_info().get("device_name", "")) if used == "gpu" else ""
    return host() | {
        "mlx": version("mlx"),
        "device": used,
        "device_name": gpu_name if used == "gpu" else cpu_name(),
        "blas": blas,
        "threads": threads,
        "MLX_ENABLE_TF32": os.environ["MLX_ENABLE_TF32"],
        **kernels(),
    }


def has(package: str) -> bool:
    """Whether a package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def require_device(device: str) -> None:
    """Refuses a comparison whose port could not run, before the oracle is asked.

    MLX itself is imported only where a GPU is asked for.
    """
    if not has("mlx"):
        raise Refusal("mlx is not installed", remedy=install("port"))
    _require_recent()
    if device == "gpu":
        _choose(require_mlx(), device)
    wanted = os.environ.get("MLXKV_BLAS", "none")
    if sys.platform == "linux" and wanted not in ("", "none"):
        _named_blas(wanted, ctypes.RTLD_LOCAL)


def require_mlx() -> Any:
    """mlx.core, or a Refusal with the line that installs it."""
    try:
        import mlx.core as mx
    except ImportError as error:
        what, remedy = "mlx is not installed", install("port")
        if "libmlx" in str(error):
            what = f"mlx is installed without its backend ({error})"
            remedy += " takes mlx[cpu] on Linux"
        raise Refusal(what, remedy=remedy) from error
    _require_recent()
    return mx


def require_mlx_lm() -> None:
    """A Refusal with the line that installs it, before anything runs."""
    if not has("mlx_lm"):
        raise Refusal("mlx-lm is not installed", remedy=install("port"))


def _require_recent() -> None:
    """Refuses an MLX that pip would not have installed beside us."""
    found = version("mlx")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    # A build from source may have no version that says anything.
    if numbers and numbers < MLX_LEAST:
        least = ".".join(map(str, MLX_LEAST))
        what = f"mlx {found} is installed, expected {least} or later"
        raise Refusal(what, remedy=install("port"))


def _choose(mx: Any, device: str) -> str:
    has_gpu = bool(mx.is_available(mx.gpu))
    if device == "gpu" and not has_gpu:
        raise Refusal("--device gpu: MLX finds no GPU here; use --device cpu or auto")
    return "gpu" if has_gpu and device != "cpu" else "cpu"


def uses_gpu(device: str) -> bool:
    """Whether MLX would compute on a GPU here. Imports MLX, except for a CPU."""
    return device != "cpu" and _choose(require_mlx(), device) == "gpu"


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def holds_together(total: int) -> bool:
    """Whether processes that take so many bytes in all may run side by side: half of the memory is
    left to the system and to files.
    """
    return total <= memory_bytes() // 2


def load_blas() -> str:
    """Loads the fastest BLAS found, so that its symbols win over MLX's own, and returns its name.

    MLXKV_BLAS names a library file instead, or `none`. Never call this in a process that runs
    torch: it changes torch's numbers and makes it slower.
    """
    if "torch" in sys.modules:
        raise RuntimeError("a BLAS for MLX must not be loaded beside torch")
    wanted = os.environ.get("MLXKV_BLAS", "")
    if wanted == "none":
        return _REFERENCE
    if wanted:
        _named_blas(wanted, ctypes.RTLD_GLOBAL)
        return wanted
    for pattern, name in _BLAS.items():
        for path in sorted(glob.glob(pattern)):
            with contextlib.suppress(OSError):
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return f"{name} ({Path(path).name})"
    return _REFERENCE


def libraries() -> list[str]:
    """The BLAS libraries that `load_blas` would find here, each with its time of change."""
    found = {path for pattern in _BLAS for path in glob.glob(pattern)}
    return [f"{path} {os.stat(path).st_mtime_ns}" for path in sorted(found)]


def _named_blas(path: str, mode: int) -> None:
    """Loads the library that MLXKV_BLAS names.

    Refused where it is no BLAS: another library would change nothing and be reported as one.
    """
    remedy = "give the path of a BLAS library, or none"
    try:
        library = ctypes.CDLL(path, mode=mode)
    except OSError as error:
        what = f"{path} cannot be loaded ({error})"
        raise Refusal(what, where="MLXKV_BLAS", remedy=remedy) from error
    if not hasattr(library, "cblas_sgemm"):
        what = f"{path} has no cblas_sgemm, expected a BLAS library"
        raise Refusal(what, where="MLXKV_BLAS", remedy=remedy)


def kernels() -> dict[str, str]:
    """The newest instructions that numpy found here, and what the loaded BLAS chose kernels for.

    Machines that call their CPU alike may differ in both, and then in the order of their sums.
    A BLAS that does not tell is left out.
    """
    import numpy as np

    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    known = [*simd.get("baseline", []), *simd.get("found", [])]
    found = {"cpu_capability": known[-1]} if known else {}
    loaded = ctypes.CDLL(None)  # what `load_blas` made visible to the whole process
    if hasattr(loaded, "bli_arch_query_id"):
        loaded.bli_arch_string.restype = ctypes.c_char_p
        found["blas_kernel"] = loaded.bli_arch_string(loaded.bli_arch_query_id()).decode()
    elif hasattr(loaded, "openblas_get_corename"):
        loaded.openblas_get_corename.restype = ctypes.c_char_p
        found["blas_kernel"] = loaded.openblas_get_corename().decode()
    return found


def host() -> dict[str, Any]:
    """The machine, without anything that names its owner."""
    macos = f"macOS {platform.mac_ver()[0]}"
    other = " ".join([platform.system(), *platform.libc_ver()])
    return {
        "os": macos if sys.platform == "darwin" else other,
        "arch": platform.machine(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "mlxkv": version("mlxkv"),
    }


def version(package: str) -> str:
    """An installed package's version, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def place(package: str) -> str:
    """Where an imported package's code lies, relative to its environment.

    The whole path could name its owner, so of one outside every environment only that is said.
    """
    home = Path(sys.modules[package].__file__ or "").parent
    for base in (sys.prefix, sys.base_prefix, site.getuserbase()):
        with contextlib.suppress(ValueError):
            return str(home.relative_to(base))
    return f"{home.name}, outside this Python's environment"


def cpu_name() -> str:
    """The processor as the system names it, and its cores."""
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        named = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
        name = named[1] if named else name
    return f"{name}, {os.cpu_count()} cores"
