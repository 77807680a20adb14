# SPDX-License-Identifier: Apache-2.0
"""What no training run imports: planning on a laptop, reports of runs, and their commands. Needs no torch."""
