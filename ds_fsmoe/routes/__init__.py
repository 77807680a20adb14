# SPDX-License-Identifier: Apache-2.0
"""Has routing as data: which token went to which experts, recorded, made up, and what can be said of it."""
