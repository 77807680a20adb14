# SPDX-License-Identifier: Apache-2.0
"""Holds routing as data: the experts of each token, recorded or synthetic."""
