# SPDX-License-Identifier: Apache-2.0
"""Makes a JSON schema of the ``"fsmoe"`` block, for completion and descriptions in editors.

``python -m ds_fsmoe.config.schema > ds_configs/ds_config.schema.json`` writes the file of the repository.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.words import BLOCK
from ds_fsmoe.shapes import old_values, shape_in, words_for


def schema() -> dict[str, Any]:
    """Return the schema of a DeepSpeed config with our block; DeepSpeed's own fields are not described."""
    block = FSMoEBlock.model_json_schema()
    definitions = block.pop("$defs")
    _add_words_of_before(FSMoEBlock, block["properties"])
    for inner in filter(None, map(shape_in, FSMoEBlock.model_fields.values())):
        _add_words_of_before(inner, definitions[inner.__name__]["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with ds_fsmoe",
        "type": "object",
        "properties": {BLOCK: block},
        "$defs": definitions,
    }


def _add_words_of_before(block: type[BaseModel], properties: dict[str, Any]) -> None:
    for name, field in block.model_fields.items():
        word, *old = words_for(name, field)
        if values := old_values(field):
            properties[word]["anyOf"].append({"enum": [*values], "deprecated": True})
        for each in old:
            properties[each] = properties[word] | {"description": f"now called {word}", "deprecated": True}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
