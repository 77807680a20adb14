# SPDX-License-Identifier: Apache-2.0
"""Gates: which experts a token goes to. One gate per file."""
