"""Package metadata. Tool settings (ruff, mypy, pytest, coverage) are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "opacus" / "version.py").read_text()).group(1)

# The oldest torch the test suite has passed on. Lower it only after running the suite on an older one.
CORE = ["torch>=2.11", "numpy>=1.24", "scipy>=1.10"]

DEMO = ["scikit-learn>=1.3", "matplotlib>=3.8", "tqdm>=4.66"]
ACCOUNTING = ["dp-accounting>=0.5"]
LIGHTNING = ["lightning>=2.2"]
# The oldest releases the trainers' tests have passed on.
HUGGING_FACE = ["transformers>=5.24", "trl>=1.16", "peft>=0.21", "accelerate>=1.15", "datasets>=5.2"]
# quantized bases: int8 and int4 of torchao, 8 and 4 bit of bitsandbytes
QUANTIZED = ["torchao>=0.18", "bitsandbytes>=0.50"]
DOCS = ["sphinx>=7"]
DEV = [
    *DEMO,
    *ACCOUNTING,
    "hypothesis>=6.100",
    "mypy>=1.14",
    "pre-commit>=3.6",
    "pytest>=8",
    "coverage>=7.10",
    "pytest-cov>=7",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.17,<0.18",  # another minor version formats differently
]

setup(
    name="opacus",
    version=VERSION,
    description="Differentially private training of PyTorch models, on one device or spread over many",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="differential privacy, DP-SGD, PyTorch, multi-GPU",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["opacus", "opacus.*"]),
    package_data={"opacus": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=CORE,
    extras_require={
        "dev": DEV,
        "demo": DEMO,
        "accounting": ACCOUNTING,
        "lightning": LIGHTNING,
        "hf": HUGGING_FACE,
        "quantized": QUANTIZED,
        "docs": DOCS,
    },
    entry_points={
        "console_scripts": ["opacus-privacy = opacus.scripts.compute_dp_sgd_privacy:main"],
    },
)
