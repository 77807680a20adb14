# SPDX-License-Identifier: Apache-2.0
"""Reports on a run while it trains: to DeepSpeed's monitors, and to the folder that ``report`` reads.

The engine calls it at the end of steps; ``ds_fsmoe/observing`` measures times instead.
"""
