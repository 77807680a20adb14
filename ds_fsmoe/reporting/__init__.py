# SPDX-License-Identifier: Apache-2.0
"""What runs have left behind, read again and shown: tables, pictures, one page. Needs no torch."""
