# SPDX-License-Identifier: Apache-2.0
"""Watches what runs: clocks, spans, step times, traces, predictions beside them, a watchdog."""
