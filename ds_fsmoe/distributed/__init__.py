# SPDX-License-Identifier: Apache-2.0
"""Process groups, where ranks lie, what they agree on, and errors raised on all of them."""
