# SPDX-License-Identifier: Apache-2.0
"""Reports on recorded runs: critical path, comparison, pictures, one HTML page."""
