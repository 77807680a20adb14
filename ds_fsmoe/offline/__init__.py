# SPDX-License-Identifier: Apache-2.0
"""What no training run imports: planning on a laptop, reports of runs, the analysis of routing, the command line."""
