# SPDX-License-Identifier: Apache-2.0
"""Saves, checks and loads DeepSpeed's checkpoints on all ranks together.

``ds_fsmoe/engine/saving_engine.py`` calls it. ``ds_fsmoe/checkpoint_files`` has the parts that need no ranks.
"""
