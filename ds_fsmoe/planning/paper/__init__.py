# SPDX-License-Identifier: Apache-2.0
"""The evaluation of the FSMoE paper, simulated: its tables and figures."""
