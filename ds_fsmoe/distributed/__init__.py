# SPDX-License-Identifier: Apache-2.0
"""Makes process groups, finds the ranks' nodes, checks that ranks agree, and raises errors on all of them.

Every folder that communicates calls it; it knows neither layers nor engines.
"""
