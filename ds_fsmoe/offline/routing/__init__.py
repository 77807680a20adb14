# SPDX-License-Identifier: Apache-2.0
"""What recorded routing says: the load of experts, as numbers and as a page."""
