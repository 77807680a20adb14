# SPDX-License-Identifier: Apache-2.0
"""Plans models without a GPU and reports on recorded runs, for the commands. No training run imports it, and it
needs no torch.
"""
