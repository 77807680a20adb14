# SPDX-License-Identifier: Apache-2.0
"""A JSON schema of the ``"fsmoe"`` block, so that editors complete it and say what a field is for.

``python -m ds_fsmoe.schema > ds_configs/ds_config.schema.json`` writes the one that comes along.
"""

from __future__ import annotations

import json
from typing import Any

from ds_fsmoe.blocks import FSMoEBlock
from ds_fsmoe.config import BLOCK


def schema() -> dict[str, Any]:
    """Of a DeepSpeed config with our block: what else stands in it is DeepSpeed's, and not described."""
    block = FSMoEBlock.model_json_schema()
    definitions = block.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with ds_fsmoe",
        "type": "object",
        "properties": {BLOCK: block},
        "$defs": definitions,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
