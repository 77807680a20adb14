# SPDX-License-Identifier: Apache-2.0
"""Packaging. A plain install compiles nothing and needs no torch; ops are built when a run first asks for them.

To compile them into the wheel instead, with the torch they will run with:
``DS_BUILD_FSMOE=1 pip install --no-build-isolation .``
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSIONS = runpy.run_path(str(ROOT / "ds_fsmoe" / "versions.py"))
SUPPORTED = VERSIONS["SUPPORTED"]
PAGE = runpy.run_path(str(ROOT / "tools" / "package_page.py"))


def compiled_ops() -> dict[str, Any]:
    """The arguments of ``setup`` that compile ops into the wheel, those for CUDA if they can be; or none of them."""
    if os.environ.get("DS_BUILD_FSMOE", "0") != "1":
        return {}
    sys.path.insert(0, str(ROOT))  # build back ends do not put the project on the path
    try:
        import deepspeed  # noqa: F401
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as err:
        raise SystemExit(
            f"DS_BUILD_FSMOE=1 compiles against the installed torch and deepspeed, but {err}. "
            "Install them first and pass --no-build-isolation to pip."
        ) from err
    import op_builder

    builders = list(op_builder.builders("cpu").values())
    for builder in op_builder.builders("cuda").values():
        # A wheel for machines without GPUs is built where there is no CUDA, and that is all right.
        if obstacles := builder.obstacles():
            print(f"{builder.name} is left out of the wheel: {'; '.join(obstacles)}")
        else:
            builders.append(builder)
    return {"ext_modules": [b.builder() for b in builders], "cmdclass": {"build_ext": BuildExtension}}


class BuildWithEntryPoint(build_py):
    """Builds the packages and puts the file for ``DS_FSMOE`` beside them, where an interpreter that starts reads it."""

    def run(self) -> None:
        super().run()
        # An editable wheel has nothing of what is built, but what lies where it is packed.
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file(str(ROOT / "ds_fsmoe" / "ds_fsmoe_entry_point.pth"), folder)


readme = ROOT / "README.md"
ops = compiled_ops()
setup(
    name="ds_fsmoe",
    version=VERSIONS["VERSION"],
    description="Faster, exact training of Mixture-of-Experts models with DeepSpeed",
    long_description=PAGE["package_page"](readme.read_text(encoding="utf-8"), VERSIONS["VERSION"])
    if readme.is_file()
    else "",
    long_description_content_type="text/markdown",
    author="The ds_fsmoe authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["mixture of experts", "MoE", "distributed training", "expert parallelism", "DeepSpeed", "PyTorch"],
    project_urls={"Paper": "https://doi.org/10.1145/3669940.3707272"} | PAGE["addresses"](),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        *(
            f"Programming Language :: Python :: {version}"
            for version in dict.fromkeys(each for each, _ in VERSIONS["RUN"])
        ),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=SUPPORTED["python"],
    # Planning and simulating need no more than this. Training does: that is the extra.
    install_requires=["numpy", "pydantic>=2.8", "rich>=13.7", "scipy"],
    extras_require={
        "train": [
            f"torch{VERSIONS['REQUIRED']['torch']}",
            f"deepspeed{SUPPORTED['deepspeed']}",
            "greenlet>=3.0",
            "packaging",
            "safetensors>=0.4.3",
        ],
        "hf": ["transformers>=5.6"],
        "plot": ["altair>=6", "jinja2", "vl-convert-python>=1.9"],
        "mpi": ["mpi4py"],
        "dev": [
            "ds_fsmoe[dev-planning,hf,mpi,plot]",
            "accelerate",
            "clang-format",
            "datasets",
            "mypy==2.4.1",
            "packaging",
            "peft>=0.21",
            "pip",
            "pre-commit",
            "pyyaml",
            "ruff",
            "scikit-learn",
            "selenium",
            "setuptools>=77",
            "trl>=1.16",
        ],
        "dev-planning": ["hypothesis", "ipykernel", "jsonschema", "nbclient", "pytest>=8", "pytest-xdist"],
    },
    # Builders and sources travel inside the package. A top-level op_builder would collide with the one in DeepSpeed's
    # source tree.
    packages=[
        *find_packages(include=["ds_fsmoe", "ds_fsmoe.*"]),
        "ds_fsmoe.ops.op_builder",
        *(f"ds_fsmoe.ops.op_builder.{name}" for name in find_packages("op_builder")),
        "ds_fsmoe.ops.csrc",
    ],
    package_dir={"ds_fsmoe.ops.op_builder": "op_builder", "ds_fsmoe.ops.csrc": "csrc"},
    package_data={
        "ds_fsmoe": [
            *("py.typed", "config/*.pyi", "planning/clusters/*.json", "offline/models/configs/*.json"),
            "offline/report/templates/*",
        ],
        "ds_fsmoe.ops.csrc": ["**/*.cpp", "**/*.h", "**/*.cu", "**/*.cuh"],
    },
    include_package_data=False,
    entry_points={"console_scripts": ["ds_fsmoe = ds_fsmoe.cli:main"]},
    zip_safe=False,
    cmdclass={"build_py": BuildWithEntryPoint, **ops.pop("cmdclass", {})},
    **ops,
)
