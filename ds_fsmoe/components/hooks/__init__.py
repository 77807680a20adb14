# SPDX-License-Identifier: Apache-2.0
"""The hooks that the package has, one per file. A config names them under ``fsmoe.hooks``."""
