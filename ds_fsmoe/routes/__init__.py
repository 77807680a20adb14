# SPDX-License-Identifier: Apache-2.0
"""Has routing as data: which token went to which experts, recorded or made up."""
