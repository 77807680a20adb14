# SPDX-License-Identifier: Apache-2.0
"""What runs have left behind: critical path, comparison, pictures, one HTML page."""
