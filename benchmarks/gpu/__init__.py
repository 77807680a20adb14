# SPDX-License-Identifier: Apache-2.0
"""Runs on one GPU: stages of checks and times, and schedules beside emulated links."""
