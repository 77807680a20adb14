# SPDX-License-Identifier: Apache-2.0
"""Decides for Lina (ATC'23): packed experts in training, and the ranks of experts in inference."""
