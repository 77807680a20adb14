# SPDX-License-Identifier: Apache-2.0
"""What is checked before training and at the first forwards, and what is said about it."""
