# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint into other forms and back: ``ds_fsmoe convert``. It needs one process and has one file in
memory at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_fsmoe.terminal.progress import Progress, followed
from ds_fsmoe.terminal.tables import print_table

HELP = "convert a checkpoint to fp32 weights, Hugging Face's names or stock DeepSpeed's files, and back"

_FORMS = {
    "fp32": "safetensors of the optimizer's own fp32 weights, under the model's names",
    "huggingface": "safetensors under Mixtral's names, one tensor for each matrix of each expert",
    "stock": "files that stock DeepSpeed loads: shards of experts joined, ours left out",
    "deepspeed": "a checkpoint of weights, from safetensors under Mixtral's names",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the source, the target and the form."""
    parser.add_argument(
        "source", type=Path, help=("source: a folder of checkpoints or of one tag; of safetensors for --to deepspeed")
    )
    parser.add_argument("target", type=Path, help="target folder, which must not exist")
    choices = "; ".join(f"{name}: {meaning}" for name, meaning in _FORMS.items())
    parser.add_argument("--to", required=True, choices=tuple(_FORMS), help=choices)
    parser.add_argument("--tag", help="tag of the checkpoint (the latest); for --to deepspeed that of the new one")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="PATTERN=REPLACEMENT",
        help="rename weights, PATTERN=REPLACEMENT by regular expressions; may be repeated",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=("dtype of weights in safetensors"))
    parser.add_argument(
        "--max-file-gb", type=float, default=5.0, help=("largest size of a safetensors file in GB (%(default)s)")
    )


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint. Return 0; problems with a checkpoint are raised."""
    if not args.max_file_gb > 0:
        raise ValueError(f"--max-file-gb {args.max_file_gb:g}: must be more than 0")
    from ds_fsmoe.checkpoint_files import convert
    from ds_fsmoe.checkpoint_files.numbering import read_rename
    from ds_fsmoe.checkpoint_files.tags import CheckpointError

    renames = [read_rename(each) for each in args.rename]
    if (args.to in ("stock", "deepspeed") and args.dtype) or (args.to == "stock" and renames):
        raise ValueError(f"--dtype and --rename have no effect with --to {args.to}")
    try:
        if args.to == "deepspeed":
            written = convert.import_tensors(args.source, args.target, args.tag or "converted", renames)
        else:
            whole = convert.open_checked(convert.find_tag(args.source, args.tag))
            if args.to == "stock":
                written = convert.export_stock(whole, args.target)
            else:
                limit_bytes = int(args.max_file_gb * 1e9)
                written = convert.export_tensors(whole, args.target, args.to, renames, args.dtype, limit_bytes)
        files = followed(written, Progress("converting", unit="files"))
        rows = [(file, f"{size_bytes / 1e6:.4g}") for file, size_bytes in files]
    except (CheckpointError, OSError) as error:
        raise ValueError(str(error)) from error
    print_table(("file", "MB"), rows)
    print(f"written to {args.target}")
    if args.to == "deepspeed":
        print(f'engine.load_checkpoint("{args.target}", load_module_only=True)')
    return 0
