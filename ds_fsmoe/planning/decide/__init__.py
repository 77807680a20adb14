# SPDX-License-Identifier: Apache-2.0
"""This package chooses: degrees, orders, all-to-alls and slices of gradients, by the costs of tasks."""
