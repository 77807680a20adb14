# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``: what it asks, what it says, and what it reads of a recorded run."""
