# SPDX-License-Identifier: Apache-2.0
"""Makes process groups, finds the ranks' nodes, compares what ranks agree on, and raises errors on all of them."""
