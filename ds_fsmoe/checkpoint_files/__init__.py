# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints, without ranks: tags, manifests, names, whole parameters, other forms."""
