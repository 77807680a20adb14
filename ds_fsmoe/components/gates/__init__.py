# SPDX-License-Identifier: Apache-2.0
"""The gates that the package has, one per file: each decides which experts a token goes to.

A config names them under ``fsmoe.gate``.
"""
