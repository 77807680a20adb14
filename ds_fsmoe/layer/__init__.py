# SPDX-License-Identifier: Apache-2.0
"""One MoE layer: its parts, the path of a token through it, and what the layers of an engine share.

``engine`` converts a model's layers to these classes; ``execution`` runs their experts' part.
"""
