# SPDX-License-Identifier: Apache-2.0
"""Handles the files of checkpoints without ranks: tags, manifests, names, whole parameters, other forms.

``ds_fsmoe/checkpoint`` calls it on all ranks, ``ds_fsmoe convert`` in one process.
"""
