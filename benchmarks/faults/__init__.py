# SPDX-License-Identifier: Apache-2.0
"""Faults that jobs survive, and thousands of steps after which nothing has grown."""
