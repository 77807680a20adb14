# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself while it trains: to DeepSpeed's monitors, and to the folder that ``report`` reads."""
