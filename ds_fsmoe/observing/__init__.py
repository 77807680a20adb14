# SPDX-License-Identifier: Apache-2.0
"""Observes running layers: clocks, spans, step times, traces with predictions, and a watchdog.

The engine and the runtime of layers attach it. ``ds_fsmoe/telemetry`` reports what it measures.
"""
