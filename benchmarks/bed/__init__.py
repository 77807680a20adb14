# SPDX-License-Identifier: Apache-2.0
"""A cluster on one machine: network namespaces as nodes, links with rates, jobs on them."""
