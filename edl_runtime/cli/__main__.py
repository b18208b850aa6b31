"""`python -m edl_runtime.cli` is the `edl` command."""

from edl_runtime.start import main

main()
