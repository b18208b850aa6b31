"""Which of the caller's environment variables instances see.

The caller may be an Airflow worker whose environment is full of secrets. So this names what passes, not what does not:
what a program needs to find its files, its libraries, its GPUs and its language.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    }
)
_PREFIXES = (
    *("LC_", "PYTHON", "XDG_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_"),
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GLOG_", "FLAGS_"),
)


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the caller's `environ` a supervisor and its instances start from."""
    return {name: value for name, value in environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
